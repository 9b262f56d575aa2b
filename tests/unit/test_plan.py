"""`forge plan`: what would be started, from headers alone."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from forge.config import load_config
from forge.fetch import fetch
from forge.plan import GIB, LIBRARIES_GIB, Sizes, arithmetic, parts, sizes, total_gib


@pytest.fixture(scope="module")
def tiny() -> Path:
    return fetch("tiny")


def test_parameters_are_counted_as_transformers_counts_them(tiny: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    found = sizes(tiny, None)
    assert found.parameters == model.num_parameters()
    assert (found.vocabulary, found.layers) == (model.config.vocab_size, model.config.num_hidden_layers)
    assert found.linear == 0


def test_gpus_go_to_parts_in_the_order_in_which_they_start() -> None:
    config = load_config("grpo", [
        "model=tiny", "placement=gpu", "trainer.ranks=2", "generator.replicas=2", "generator.tensor_parallel=2",
        "algo.kl=0.1", "quant.scheme=int8_dynamic",
    ])  # fmt: skip
    assert [(p.name, p.processes, p.where) for p in parts(config, None)] == [
        ("weight store", 1, "cpu"),
        ("calibrator", 1, "gpu 0"),
        ("trainer", 2, "gpu 1 to 2"),
        ("generator 0", 1, "gpu 3 to 4"),
        ("generator 1", 1, "gpu 5 to 6"),
        ("reference", 1, "gpu 7"),
        ("reward", 2, "cpu"),
    ]
    assert total_gib(parts(config, None)) is None


def test_memory_follows_ranks_checkpoints_and_bits(tiny: Path) -> None:
    def elements(part: str, *overrides: str) -> float:
        config = load_config("grpo", ["model=tiny", "sampling.max_new_tokens=1", "trainer.micro_batch=1", *overrides])
        quantized = "quant.scheme=int8_static" in overrides
        (found,) = (p.gib for p in parts(config, model, 8 if quantized else 16) if p.name == part)
        assert found is not None
        return (found - LIBRARIES_GIB[{"weight store": "store"}.get(part, part)]) * GIB

    model = replace(sizes(tiny, None), linear=10_000)
    p = model.parameters
    batch = 4 * (3 * model.vocabulary + 16 * model.layers * 65 * model.hidden)  # a prompt of 64 tokens and one more
    # weights, gradients, two moments: 16 bytes a parameter; bf16 as published, twice; gathered weights on every rank
    assert elements("trainer", "trainer.ranks=1", "checkpoint.every=0") == pytest.approx(24 * p + batch)
    assert elements("trainer", "trainer.ranks=2", "checkpoint.every=0") == pytest.approx(14 * p + batch)
    assert elements("trainer", "trainer.ranks=2", "checkpoint.every=1") == pytest.approx(20 * p + batch)
    assert elements("weight store") == pytest.approx(4 * 2 * p)
    forms = 2 * p + 2 * p - 10_000
    assert elements("trainer", "trainer.ranks=1", "checkpoint.every=0", "quant.scheme=int8_static") == pytest.approx(
        20 * p + 2 * forms + batch
    )


def test_the_estimate_is_near_what_runs_took() -> None:
    """SmolLM2 for 30 steps, bf16 and int8 rollouts, as in docs/log.md: 11.7 and 15.8 GiB."""
    model = Sizes(parameters=134_515_008, linear=79_626_240, vocabulary=49_152, hidden=576, layers=30)
    for overrides, bits, took in (["quant.scheme=none", "checkpoint.export=false"], 16, 11.7), ([], 8, 15.8):
        config = load_config("grpo", ["experiment=grpo_int8_static", *overrides])
        assert total_gib(parts(config, model, bits)) == pytest.approx(took, rel=0.1)


def test_the_arithmetic_shows_its_numbers() -> None:
    config = load_config("grpo", [
        "model=tiny", "prompts_per_step=3", "group_size=5", "trainer.ranks=2", "trainer.micro_batch=3", "steps=7",
        "async.max_age=2",
    ])  # fmt: skip
    found = dict(arithmetic(config))
    assert found["episodes a step"] == "3 prompts x 5 = 15"
    assert found["of one rank"] == "15 / 2 ranks, at most 8"
    assert found["micro-batches of a rank"] == "8 / 3, rounded up: 3"
    assert found["completions in all"] == "7 x 15 = 105"
    assert found["groups under way"] == "(max_age 2 + 1) x 3 = 9"
    assert found["age of trained groups"] == "at most 2 steps"


def test_the_command_loads_no_engine(tiny: Path) -> None:
    code = (
        "import sys; from forge.apps.plan import main\n"
        "status = main(['model=tiny', 'quant.scheme=int4_weight'])\n"
        "print('LOADED', sorted({'torch', 'vllm', 'transformers', 'monarch'} & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "LOADED [] 0" in done.stdout
    assert "all together about" in done.stdout
    assert "scheme: int4_weight" in done.stdout


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("quant.layers=q_proj", "engines fuse k_proj, q_proj, v_proj"),
        ("trainer.micro_batch=999", "trainer.micro_batch=999 is more than"),
    ],
)
def test_what_cannot_work_is_refused(override: str, says: str, tiny: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "forge.apps", "plan", "model=tiny", "quant.scheme=int4_weight", override],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert says in done.stderr
