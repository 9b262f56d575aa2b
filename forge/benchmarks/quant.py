"""Generators of Forge serving int8 and int4 weights against one serving bf16, and the bytes a version takes."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forge.actors.generator import Generator
from forge.actors.stock import live_version
from forge.bench import Claim, alternate, claim
from forge.benchmarks.workload import RUNS, made_up_requests, model_folder
from forge.config import GrpoConfig
from forge.engine_vllm import expected_tensors, prepare_environment
from forge.files import scratch_folder
from forge.mesh import spawn
from forge.quant import Quantization
from forge.quant.pack import num_bytes, quantized_specs

QUANTIZED = {"int8_dynamic": "w8a8 dynamic", "int8_static": "w8a8 static", "int4_weight": "w4a16"}


async def run(config: GrpoConfig) -> list[Claim]:
    """Tokens a second and bytes of each scheme over those of bf16."""
    folder = model_folder(config)
    requests = made_up_requests(config)
    claims: list[Claim] = []
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(scratch_folder())

        async def start(scheme: str) -> Any:
            own = replace(config, quant=replace(config.quant, scheme=scheme))
            env = prepare_environment(own, logs)
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


def _bytes(config: GrpoConfig, folder: Path) -> list[Claim]:
    """Bytes of a published version over those of an unquantized one."""
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
