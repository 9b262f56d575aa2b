"""What `forge grpo` refuses: one readable line, exit status 2, before anything loads and before any process starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SETTINGS = [
    ("trainer.lerning_rate=1e-5", "no key 'trainer.lerning_rate'; did you mean trainer.lr?"),
    ("sampling.top_p=0.9", "no key 'sampling.top_p'; did you mean sampling.temperature?"),
    ("+steps=3", "write key=value"),
    ("steps", "not of the form key=value"),
    ("steps=1,2", "one run takes one value"),
    ("steps=0", "steps must be at least 1, got 0"),
    ("seed=08", "seed must be a whole number, got '08'"),
    ("name=a/b", "name must be a plain folder name, got 'a/b'"),
    ("group_size=2.5", "group_size must be a whole number, got 2.5"),
    ("group_size=1", "a group of one has nothing to compare with"),
    ("async=2", "async is a section; set one of its keys"),
    ("async.max_age=None", "async.max_age must be a whole number, got 'None'"),
    ("async.max_age=-1", "async.max_age must be 0 (synchronous) or more steps, got -1"),
    ("async.window=2", "async.window is a share between 0 and 1, got 2.0"),
    ("algo.scale_by_std=on", "algo.scale_by_std must be true or false, got 'on'"),
    ("algo.correction=ppo", "algo.correction must be one of clip, tis"),
    ("trainer.lr=-1", "trainer.lr must be above 0, got -1.0"),
    ("trainer.ranks=0", "trainer.ranks must be 1 to 4096, got 0"),
    ("trainer.dtype=float16", "trainer.dtype must be one of bfloat16, float32, got 'float16'"),
    ("trainer.micro_batch=100", "more than the 64 episodes of a step (prompts_per_step=8 x group_size=8)"),
    ("trainer.ranks=3 trainer.micro_batch=2 prompts_per_step=1 group_size=2", "legal values are 1 to 2"),
    ("generator.replicas=0", "generator.replicas must be 1 to 4096, got 0"),
    ("generator.tensor_parallel=2", "needs GPUs, but placement is cpu: use generator.replicas"),
    ("generator.canary_max_gap=-1", "generator.canary_max_gap must be 0 (no check) or more nats, got -1.0"),
    ("sampling.temperature=0", "greedy groups have no variance"),
    ("sampling.max_new_tokens=512", "leaves no room for a prompt within model.max_len=512"),
    ("reward.timeout_s=0", "reward.timeout_s must be above 0 seconds, got 0.0"),
    ("checkpoint.keep=0", "checkpoint.keep must be at least 1, got 0"),
    ("stall_timeout_s=0", "stall_timeout_s must be above 0 seconds, got 0.0"),
    ("max_restarts=-1", "max_restarts must be 0 (a dead part ends the run) or more, got -1"),
    ("resume=auto", "resume=auto continues a named run: set name="),
    ("resume=no/such", "resume must be auto, never or the path of a checkpoint folder, got 'no/such'"),
    ("model=smolm2", "did you mean smollm2?"),
    ("data=no/such.jsonl", "data.path=no/such.jsonl does not exist"),
    ("placement=tpu", "placement must be one of cpu, gpu"),
    ("experiment=nosuch", "experiment must be one of demo"),
    ("quant.scheme=int3", "fp8_dynamic; got 'int3'"),
    ("quant.scheme=fp8_dynamic", "needs GPUs, but placement is cpu: int8_dynamic is its counterpart there"),
    ("quant.group_size=48", "quant.group_size must be 32, 64, 128 or 256, got 48"),
    ("quant.layers='mlp['", "quant.layers must be a regular expression, got 'mlp['"),
    ("quant.qat.enabled=true", "quant.qat.enabled=true needs a quant.scheme to train for, got none"),
    ("quant.scheme=8da4w quant.qat.enabled=true quant.qat.start_step=20", "start_step=20 never comes: the run has st"),
    ("quant.scheme=int8_static calibration.min_tokens=512", "refuses every row: none is longer than model.max_len=512"),
    ("quant.scheme=int8_static calibration.prompts=4", "calibration.prompts=4 is less than calibration.min_rows=8"),
    ("calibration.batch_size=2 calibration.iterations=3", "min_rows=8 is more than the rows of all passes"),
    ("rollback.qat_fraction=2", "rollback.qat_fraction is a share in (0, 1], got 2.0"),
    ("generator.replicas=100000000", "generator.replicas must be 1 to 4096, got 100000000"),
    (f"steps={'9' * 5000}", "a value of 5006 characters cannot be read: write a shorter one"),
    (f"trainer.lr=1{'0' * 400}", "trainer.lr must be a number, got 1000"),
    (f"data={'a' * 300}", "is too long for a path (300 characters; a name in it may have 255 bytes"),
    (f"resume={'a' * 300}", "resume='aaaaa"),
    ("--config=anchor.yaml", "config file anchor.yaml cannot be read: nested too deeply, or an anchor that holds"),
    ("--config=deep.yaml", "config file deep.yaml cannot be read: nested too deeply"),
    ("--config=null.yaml", "name='a\\x00b' holds a null byte, which no path can"),
    ("--config=pipe", "config file pipe: is not a regular file"),
    ("--config=nosuch.yaml", "config file nosuch.yaml: No such file or directory"),
]
"""Arguments, each refused without importing torch, transformers, vLLM or Monarch."""

INPUTS = [
    ("reward.name=maths", "did you mean 'math'?"),
    ("reward.name=no_module:Even", "cannot be imported (No module named 'no_module')"),
    ("reward.name=json:loads", "is not a subclass of forge.reward.Reward"),
    ("data=empty.jsonl", "empty.jsonl holds no rows"),
    ("data=broken.jsonl", "broken.jsonl:2: broken JSON at column 13"),
    ("data=unanswered.jsonl", "no row has a column 'answer': set data.answer to one of question"),
    ("data.question=prompt", "no row has a column 'prompt': set data.question to one of question, answer"),
    ("prompts_per_step=8", "3 rows to train on (3 usable, 0 of them held out) are fewer than the 8 prompts of a step"),
    ("model=no/such", "no/such"),
    ("model=bare", "bare: config.json is missing"),
    ("model=pickled", "only pickled weights (pytorch_model.bin), which can run code when they are read"),
    ("model.name=llama3_8b model.hub_id=a/b", "download a/b from the Hugging Face Hub and give model.path=FOLDER"),
    ("data=pipe.jsonl", "cannot read pipe.jsonl: is not a regular file"),
    ("data=listing", "state.json does not list its _data_files by filename"),
    ("model=piped", "piped: config.json cannot be read: is not a regular file"),
    ("resume=typed name=n", "resume=typed: not a complete checkpoint (state.json is missing or holds something else)"),
    ("resume=deep name=n", "resume=deep: not a complete checkpoint (state.json is missing or holds something else)"),
    ("resume=untrained name=n", "not a complete checkpoint (a file of the trainer is missing or damaged)"),
    ("out='~nosuchuser/x'", "~nosuchuser/x: no user of that name has a home folder here"),
    ("resume=bare name=n", "resume=bare: not a complete checkpoint"),
    ("name=taken", "name=taken is taken: runs/grpo/taken holds x"),
    ("out=empty.jsonl", "which cannot be written (Not a directory); choose a place with out="),
    ("data.path=null data.task=nosuch", "reasoning-gym has no such task"),
]
"""Arguments whose files are looked at first; added to a job that could run."""
JOB = (
    "model=tiny reward.name=exact data=three.jsonl data.heldout=0 prompts_per_step=2 group_size=4 trainer.micro_batch=4"
)

PROBE = """
import contextlib, io, json, sys
import psutil
from forge.apps import grpo

class Nothing:
    heavy = {"torch", "transformers", "vllm", "monarch"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.heavy:
            raise ImportError(f"{name} is loaded")

nothing = Nothing()
sys.meta_path.insert(0, nothing)
for light, arguments in json.load(sys.stdin):
    if not light:
        nothing.heavy = set()
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = grpo.main(arguments)
    started = [p.name() for p in psutil.Process().children()]
    print(json.dumps([arguments, status, said.getvalue().splitlines(), started]), flush=True)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[str], list[str]]]:
    """Status, lines on stderr and processes started, by the arguments: all in one process, as importing costs most."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n{"question": \n')
    (folder / "unanswered.jsonl").write_text('{"question": "1 + 1"}\n')
    (folder / "three.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n' * 3)
    for name in ("bare", "pickled", "runs/grpo/taken", "listing", "piped", "typed", "deep", "untrained"):
        (folder / name).mkdir(parents=True)
    for pipe in ("pipe", "pipe.jsonl", "piped/config.json"):
        os.mkfifo(folder / pipe)
    (folder / "anchor.yaml").write_text("a: &a [*a]\n")
    (folder / "deep.yaml").write_text("[" * 3000)
    (folder / "null.yaml").write_text('name: "a\\0b"\n')
    (folder / "listing/state.json").write_text('{"_data_files": [{"x": 1}]}')
    state = {"step": 1, "seed": 0, "prompts_per_step": 2, "order": {"next_group": 2, "pending": []}}
    (folder / "untrained/state.json").write_text(json.dumps(state))
    (folder / "typed/state.json").write_text(json.dumps({**state, "step": "abc"}))
    (folder / "deep/state.json").write_text("[" * 200_000)
    (folder / "runs/grpo/taken/x").write_text("")
    (folder / "pickled/pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    cases = [(True, text.split()) for text, _ in SETTINGS]
    cases += [(False, [*JOB.split(), *text.split()]) for text, _ in INPUTS]
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(cases), cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f[0] for f in found] == [arguments for _, arguments in cases]
    assert [p.name for p in (folder / "runs/grpo").iterdir()] == ["taken"]
    return {text: (f[1], f[2], f[3]) for (text, _), f in zip(SETTINGS + INPUTS, found, strict=True)}


@pytest.mark.parametrize(("arguments", "says"), SETTINGS + INPUTS, ids=[a[:60] for a, _ in SETTINGS + INPUTS])
def test_it_is_refused_in_one_line_before_anything_loads(
    arguments: str, says: str, refusals: dict[str, tuple[int, list[str], list[str]]]
) -> None:
    status, lines, started = refusals[arguments]
    assert status == 2
    assert started == []
    assert all(line.startswith("forge: ") for line in lines), lines
    assert any(says in line for line in lines), lines
    if arguments not in (
        "data=broken.jsonl",
        "model=bare",
        "model=pickled",
        "model=piped",
    ):  # which have several faults
        assert len(lines) == 1


def test_there_are_forty_and_more() -> None:
    assert len({a for a, _ in SETTINGS + INPUTS}) > 40
