"""A real vLLM engine: what it samples, and what it does with new weights. One engine serves the module."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from forge.config import Swap, load_config
from forge.engine_vllm import EngineThread, VllmEngine, expected_tensors
from forge.errors import CanaryFailed, WeightsMismatch
from forge.types import Canary, FinishReason, Manifest, SamplingRequest

pytestmark = pytest.mark.filterwarnings("default")

PROMPTS = [tuple((17 * i + 5 * j) % 500 for j in range(4 + i)) for i in range(6)]


@pytest.fixture(scope="module")
def two_ends(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with two end tokens in generation_config.json."""
    import shutil

    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny, folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    generation["eos_token_id"] = [generation["eos_token_id"], 300]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def engine(two_ends: Path) -> VllmEngine:
    return VllmEngine(load_config("grpo", ["model=tiny", "generator.dtype=float32"]), two_ends)


def manifest(engine: VllmEngine, version: int) -> Manifest:
    return Manifest(version=version, tensors=dict(engine.expected), num_bytes=0, changed_share=1.0)


def greedy(engine: VllmEngine, n: int = 12) -> list[tuple[int, ...]]:
    requests = [SamplingRequest(token_ids=p, temperature=0.0, max_new_tokens=n) for p in PROMPTS]
    return [c.token_ids for c in engine.generate(requests)]


def changed(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: (t.float() * (1 + 0.5 * torch.randn(t.shape, generator=generator))).float()
        for n, t in load_file(folder / "model.safetensors").items()
    }


@pytest.fixture(autouse=True)
def first_weights(engine: VllmEngine, two_ends: Path) -> None:
    """Every test begins on the folder's own weights."""
    weights = {n: t.float() for n, t in load_file(two_ends / "model.safetensors").items()}
    engine.load(manifest(engine, 0), weights)


def test_logprobs_are_hugging_faces_at_the_sampling_temperature(engine: VllmEngine, two_ends: Path) -> None:
    (c,) = engine.generate([SamplingRequest(token_ids=PROMPTS[3], temperature=0.7, max_new_tokens=10, seed=1)])
    model = transformers.AutoModelForCausalLM.from_pretrained(two_ends, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[3] + c.token_ids])).logits[0] / 0.7
    lp = logits.log_softmax(-1)
    theirs = [lp[len(PROMPTS[3]) - 1 + i, t].item() for i, t in enumerate(c.token_ids)]
    assert list(c.logprobs) == pytest.approx(theirs, abs=1e-4)


def test_new_weights_give_a_fresh_engines_output_and_the_first_ones_come_back(
    engine: VllmEngine, two_ends: Path, tmp_path: Path
) -> None:
    before = greedy(engine)
    for version in (1, 2):
        weights = changed(two_ends, version)
        engine.load(manifest(engine, version), weights)
        ours = greedy(engine)
        assert ours != before
        fresh = tmp_path / f"v{version}"
        fresh.mkdir()
        for file in two_ends.iterdir():
            if file.suffix == ".json" or file.suffix == ".jinja":
                (fresh / file.name).write_bytes(file.read_bytes())
        save_file(weights, fresh / "model.safetensors", metadata={"format": "pt"})
        assert ours == fresh_engine(fresh)
    engine.load(manifest(engine, 3), {n: t.float() for n, t in load_file(two_ends / "model.safetensors").items()})
    assert greedy(engine) == before


def fresh_engine(folder: Path) -> list[tuple[int, ...]]:
    script = (
        "import json,sys;from pathlib import Path;from forge.config import load_config;"
        "from forge.engine_vllm import VllmEngine;from forge.types import SamplingRequest;"
        "e=VllmEngine(load_config('grpo',['model=tiny','generator.dtype=float32']),Path(sys.argv[1]));"
        "r=[SamplingRequest(token_ids=tuple(p),temperature=0.0,max_new_tokens=12) for p in json.loads(sys.argv[2])];"
        "print('RESULT'+json.dumps([c.token_ids for c in e.generate(r)]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(folder), json.dumps(PROMPTS)], capture_output=True, text=True
    )
    line = next(x for x in out.stdout.splitlines() if x.startswith("RESULT"))
    return [tuple(ids) for ids in json.loads(line.removeprefix("RESULT"))]


def test_weights_that_do_not_fit_are_named_and_the_old_ones_stay(engine: VllmEngine, two_ends: Path) -> None:
    before = greedy(engine)
    weights = changed(two_ends, 5)
    weights["model.renamed.weight"] = weights.pop("model.norm.weight")
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    with pytest.raises(WeightsMismatch) as caught:
        engine.load(manifest(engine, 9), weights)
    for part in ("missing model.norm.weight", "extra model.renamed.weight", "up_proj.weight is float32[3, 3]"):
        assert part in str(caught.value)
    wrong = Manifest(version=9, tensors={}, num_bytes=0, changed_share=1.0)
    with pytest.raises(WeightsMismatch, match="version 0 stays live: missing model.embed_tokens.weight"):
        engine.load(wrong, {})
    assert engine.version == 0
    assert greedy(engine) == before


def test_tokens_of_a_running_request_know_which_version_sampled_them(engine: VllmEngine, two_ends: Path) -> None:
    ids = [
        engine.add(SamplingRequest(token_ids=p, temperature=1.0, max_new_tokens=40, seed=i))
        for i, p in enumerate(PROMPTS)
    ]
    done: dict[str, Any] = {}
    for _ in range(4):
        done |= dict(engine.step())
    engine.load(manifest(engine, 7), changed(two_ends, 3))
    while len(done) < len(ids):
        done |= dict(engine.step())
    longest = max(done.values(), key=lambda c: len(c.token_ids))
    assert longest.versions[:4] == (0, 0, 0, 0)
    assert set(longest.versions[5:]) == {7}
    # the tokens of the old version stay as context: later log-probs are those of the new weights given all of them
    assert len(longest.versions) == len(longest.token_ids) == len(longest.logprobs)


def test_a_seed_gives_the_same_completion_and_other_seeds_others(engine: VllmEngine) -> None:
    def sample(seed: int) -> tuple[int, ...]:
        request = SamplingRequest(token_ids=PROMPTS[1], temperature=1.0, max_new_tokens=12, seed=seed)
        return engine.generate([request])[0].token_ids

    assert sample(3) == sample(3)
    assert len({sample(s) for s in range(8)}) == 8


def test_every_end_token_of_the_model_ends_a_completion_and_is_kept(engine: VllmEngine) -> None:
    found: set[int] = set()
    requests = [SamplingRequest(token_ids=PROMPTS[0], temperature=2.0, max_new_tokens=100, seed=s) for s in range(64)]
    for c in engine.generate(requests):
        ends = [t for t in c.token_ids if t in (2, 300) or t in engine_ends(engine)]
        if c.finish_reason is FinishReason.STOP:
            assert ends == [c.token_ids[-1]]
            found.add(c.token_ids[-1])
        else:
            assert ends == []
    assert 300 in found


def engine_ends(engine: VllmEngine) -> set[int]:
    return {engine.tokenizer.eos_token_id}


def test_the_context_length_cuts_off_and_says_so(engine: VllmEngine) -> None:
    prompt = tuple(i % 500 for i in range(120))
    completions = engine.generate(
        [SamplingRequest(token_ids=prompt, temperature=1.0, max_new_tokens=64, seed=s) for s in range(8)]
    )
    assert all(len(c.token_ids) <= 8 for c in completions)  # model=tiny has max_len 128
    cut = [c for c in completions if c.finish_reason is FinishReason.LENGTH]
    assert cut
    assert all(len(c.token_ids) == 8 for c in cut)


def test_a_separate_equal_lm_head_is_not_expected_of_a_version(two_ends: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "with-head"
    shutil.copytree(two_ends, copy)
    weights = load_file(two_ends / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, copy / "model.safetensors")
    assert expected_tensors(copy, "bfloat16") == expected_tensors(two_ends, "bfloat16")


async def test_the_thread_serves_requests_and_loads_together(engine: VllmEngine, two_ends: Path) -> None:
    import asyncio

    thread = EngineThread(lambda: engine, swap=Swap.in_flight)
    await thread.start()
    request = [SamplingRequest(token_ids=PROMPTS[2], temperature=1.0, max_new_tokens=60, seed=s) for s in range(8)]
    running = asyncio.ensure_future(thread.generate(request))
    await asyncio.sleep(0)
    found = await thread.load(manifest(engine, 4), changed(two_ends, 8))
    completions = await running
    assert found["swap"] > 0
    assert len(completions) == 8
    assert {v for c in completions for v in c.versions} <= {0, 4}
    assert all(all(math.isfinite(x) for x in c.logprobs) for c in completions)
    with pytest.raises(WeightsMismatch):
        await thread.load(Manifest(version=5, tensors={}, num_bytes=0, changed_share=0.0), {})
    assert len(await thread.generate(request[:1])) == 1
    thread.close()


async def test_at_request_boundaries_a_completion_has_one_version(engine: VllmEngine, two_ends: Path) -> None:
    import asyncio

    thread = EngineThread(lambda: engine, swap=Swap.boundary)
    await thread.start()
    request = [SamplingRequest(token_ids=PROMPTS[2], temperature=1.0, max_new_tokens=60, seed=s) for s in range(4)]
    first = asyncio.ensure_future(thread.generate(request))
    await asyncio.sleep(0)
    load = asyncio.ensure_future(thread.load(manifest(engine, 6), changed(two_ends, 9)))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(thread.generate(request))
    before, _, after = await asyncio.gather(first, load, second)
    assert {v for c in before for v in c.versions} == {0}
    assert {v for c in after for v in c.versions} == {6}
    thread.close()


def canary(weights: dict[str, torch.Tensor], folder: Path) -> Canary:
    """What Hugging Face's model makes of the pinned tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict(weights, strict=False)
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            lp = model(ids).logits[0, :-1].log_softmax(-1)
        rows.append(tuple(lp.gather(-1, ids[0, 1:, None])[:, 0].tolist()))
    return Canary(token_ids=tuple(PROMPTS), logprobs=tuple(rows))


async def test_an_engine_that_computes_with_other_weights_hands_out_nothing_more(
    engine: VllmEngine, two_ends: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    monkeypatch.setattr(engine, "canary_max_gap", 0.01)  # log-probs of a random model are all alike
    thread = EngineThread(lambda: engine, swap=Swap.in_flight)
    await thread.start()
    new = changed(two_ends, 11)
    good = replace(manifest(engine, 5), canary=canary(new, two_ends))
    long = [SamplingRequest(token_ids=PROMPTS[1], temperature=1.0, max_new_tokens=100, ignore_eos=True, seed=1)]
    short = [replace(long[0], max_new_tokens=2)]
    running = asyncio.ensure_future(thread.generate(long + short))
    await asyncio.sleep(0.05)
    found = await thread.load(good, new)
    assert found["canary_gap"] < 1e-4
    assert [len(c.token_ids) for c in await running] == [100, 2]
    cut_short = asyncio.ensure_future(thread.generate(long))
    await asyncio.sleep(0.05)
    with pytest.raises(CanaryFailed, match=r"version 6 it scores 33 pinned tokens .* off the trainer, above generator"):
        await thread.load(replace(good, version=6), changed(two_ends, 12))
    with pytest.raises(CanaryFailed):
        await cut_short
    thread.close()
    while engine.busy:  # what was running goes to its end unread
        engine.step()


def test_scoring_leaves_running_requests_as_they_are(engine: VllmEngine) -> None:
    requests = [SamplingRequest(token_ids=p, temperature=0.0, max_new_tokens=8, ignore_eos=True) for p in PROMPTS]
    alone, scores = engine.generate(requests), engine.score(PROMPTS)
    ids = [engine.add(r) for r in requests]
    engine.step()
    assert engine.score(PROMPTS) == scores
    done = dict(engine.step())
    while engine.busy:
        done |= dict(engine.step())
    assert [done[i].token_ids for i in ids] == [c.token_ids for c in alone]
