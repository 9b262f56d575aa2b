"""`forge bench NAME [key=value …]`: measure Forge against a peer or a limit, in one run; runs/bench/NAME.json."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forge.bench import Claim, alternate, claim, table, write_claims
from forge.config import GrpoConfig, QuantConfig, load_config
from forge.errors import RefusedInput
from forge.types import SamplingRequest

RUNS = 5
QUANTIZED = {"int8_dynamic": "w8a8 dynamic", "int8_static": "w8a8 static", "int4_weight": "w4a16"}


async def rollout(config: GrpoConfig) -> list[Claim]:
    """A generator of Forge, called from the controller, against plain vllm.LLM.generate on the same prompts."""
    import tempfile

    from forge.actors.generator import Generator
    from forge.actors.peers import PlainVllm
    from forge.engine_vllm import prepare_environment
    from forge.fetch import fetch
    from forge.mesh import spawn

    folder = Path(config.model.path) if config.model.path else fetch(config.model.name)
    env = prepare_environment(config)
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = await spawn("generator 0", Generator, config, folder, "", 0, log_dir=logs, env=env)
        stack.push_async_callback(ours.stop)
        peer = await spawn("plain vllm", PlainVllm, config, folder, log_dir=logs, env=env)
        stack.push_async_callback(peer.stop)
        await ours.call("setup")
        await peer.call("setup")
        requests = _requests(config)

        async def forge() -> float:
            start = time.perf_counter()
            completions = await ours.call_one("generate", requests)
            return sum(len(c.token_ids) for c in completions) / (time.perf_counter() - start)

        async def plain() -> float:
            return await peer.call_one("tokens_per_second", requests)

        a, b = await alternate(forge, plain, runs=RUNS)
    text = f"rollout: Forge generator over plain vllm.LLM.generate, {config.model.name}, {len(requests)} prompts"
    return [claim(text, a, b, "tokens/s")]


def _requests(config: GrpoConfig) -> list[SamplingRequest]:
    """A step's episodes with made-up prompts of 40 tokens and completions of 64."""
    return [
        SamplingRequest(
            token_ids=tuple((31 * i + 7 * j) % 500 + 100 for j in range(40)),
            temperature=1.0,
            max_new_tokens=64,
            seed=i,
            ignore_eos=True,
        )
        for i in range(config.episodes_per_step)
    ]


def _bytes(config: GrpoConfig, folder: Path) -> list[Claim]:
    """Bytes of a published version over those of an unquantized one."""
    from forge.engine_vllm import expected_tensors
    from forge.quant import Quantization
    from forge.quant.pack import num_bytes, quantized_specs

    quantization = Quantization.of(config.quant)
    assert quantization is not None
    served = config.generator.dtype.value
    plain = expected_tensors(folder, served)
    found = quantized_specs(plain, quantization, served=served)
    low_bit = {n: s for n, s in found.items() if plain.get(n) != s}
    of_layers = {n: s for n, s in plain.items() if found.get(n) != s}
    name = f"{quantization.scheme.name}, {config.model.name}"
    pairs = ((f"quantized layers, {name}", low_bit, of_layers), (f"all tensors, {name}", found, plain))
    return [
        claim(f"quant: published bytes over bf16, {what}", [float(num_bytes(a))], [float(num_bytes(b))], "bytes")
        for what, a, b in pairs
    ]


async def quant(config: GrpoConfig) -> list[Claim]:
    """Generators of Forge serving int8 and int4 weights against one serving bf16, and the bytes a version takes."""
    import tempfile

    from forge.actors.generator import Generator
    from forge.actors.stock import live_version
    from forge.engine_vllm import prepare_environment
    from forge.fetch import fetch
    from forge.mesh import spawn

    folder = Path(config.model.path) if config.model.path else fetch(config.model.name)
    requests = _requests(config)
    claims: list[Claim] = []
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        async def start(scheme: str) -> Any:
            own = replace(config, quant=replace(config.quant, scheme=scheme))
            env = prepare_environment(own)
            part = await spawn(f"generator {scheme}", Generator, own, folder, "", 0, log_dir=logs, env=env)
            stack.push_async_callback(part.stop)
            await part.call("setup")
            if scheme != "none":
                await part.call_one("load", *live_version(own, folder))
            return part

        async def speed(part: Any) -> float:
            start_s = time.perf_counter()
            completions = await part.call_one("generate", requests)
            return sum(len(c.token_ids) for c in completions) / (time.perf_counter() - start_s)

        plain = await start("none")
        for scheme, label in QUANTIZED.items():
            sys.stderr.write(f"{label} against bf16: {RUNS} runs of each, taking turns\n")
            part = await start(scheme)
            ours, theirs = await alternate(partial(speed, part), partial(speed, plain), runs=RUNS)
            text = f"quant: {label} rollouts over bf16 rollouts, {config.model.name}, {len(requests)} requests"
            claims.append(claim(text, ours, theirs, "tokens/s"))
            sys.stderr.write(f"{claims[-1].ours:.0f} against {claims[-1].peer:.0f} tokens/s: {claims[-1].ratio:.3f}\n")
            await part.stop()
            claims += _bytes(replace(config, quant=replace(config.quant, scheme=scheme)), folder)
    return claims


async def gap(config: GrpoConfig) -> list[Claim]:
    """Mean |log-prob difference| of sampled tokens, engine to trainer: quantized over bf16, prepared over not."""
    import tempfile

    from forge.actors.calibrator import start_smoothed
    from forge.actors.generator import Generator
    from forge.actors.stock import live_version
    from forge.engine_vllm import prepare_environment
    from forge.errors import ConfigError
    from forge.inputs import check_inputs
    from forge.mesh import spawn
    from forge.parity import gap as mean_gap

    if config.quant.scheme == "none":
        raise ConfigError("forge bench gap needs quant.scheme: for example quant.scheme=int8_dynamic")
    folder, dataset, _ = check_inputs(config, None)
    prompts = [dataset.prompt(i).token_ids for i in range(config.episodes_per_step)]
    tokens = config.sampling.max_new_tokens
    requests = [
        SamplingRequest(token_ids=p, temperature=1.0, max_new_tokens=tokens, seed=i, ignore_eos=True)
        for i, p in enumerate(prompts)
    ]

    def tails(scores: list[list[float]]) -> list[list[float]]:
        return [s[len(p) - 1 :] for s, p in zip(scores, prompts, strict=True)]

    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forge-")))

        async def sample(own: GrpoConfig, model: Path, *version: Any) -> tuple[list[Any], list[tuple[float, ...]]]:
            """Rows of token ids, and the log-probs that their completions were sampled with."""
            sys.stderr.write(
                f"sampling {len(prompts)} completions of {tokens} tokens: quant.scheme={own.quant.scheme}\n"
            )
            env = prepare_environment(own)
            part = await spawn(f"generator {own.quant.scheme}", Generator, own, model, "", 0, log_dir=scratch, env=env)
            stack.push_async_callback(part.stop)
            await part.call("setup")
            if version:
                await part.call_one("load", *version)
            found = await part.call_one("generate", requests)
            await part.stop()
            return [p + c.token_ids for p, c in zip(prompts, found, strict=True)], [c.logprobs for c in found]

        rows, sampled = await sample(replace(config, quant=QuantConfig()), folder)
        calibrator, model = await start_smoothed(config, folder, rows, scratch=scratch, stack=stack)
        plain = mean_gap(sampled, tails(await calibrator.call_one("score", rows, None)))["mean"]
        scales = (await calibrator.call_one("measure", rows, [], {})).scales
        rows, sampled = await sample(config, model, *live_version(config, model, scales))
        prepared = mean_gap(sampled, tails(await calibrator.call_one("score", rows, scales)))["mean"]
        unquantized = mean_gap(sampled, tails(await calibrator.call_one("score", rows, None)))["mean"]
    engine = f"gap: {config.quant.scheme} engine and prepared trainer"
    return [
        claim(f"{engine} over bf16 engine and unquantized trainer, {config.model.name}", [prepared], [plain], "nats"),
        claim(f"{engine} over the engine and unquantized trainer", [prepared], [unquantized], "nats"),
    ]


BENCHMARKS = {"rollout": rollout, "quant": quant, "gap": gap}


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns its exit status."""
    from forge.apps.common import refuse

    if not argv or argv[0] not in BENCHMARKS:
        sys.stderr.write(f"usage: forge bench NAME [key=value …]; NAME is one of {', '.join(BENCHMARKS)}\n")
        return 2
    name, overrides = argv[0], argv[1:]
    try:
        config = load_config("grpo", overrides)
        claims = asyncio.run(BENCHMARKS[name](config))
    except RefusedInput as error:
        return refuse(error)
    path = Path(config.out) / "bench" / f"{name}.json"
    write_claims(claims, path)
    sys.stdout.write(f"{table(claims)}\nwritten to {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
