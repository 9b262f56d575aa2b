"""An exported folder in a fresh, stock vLLM: scored and timed against the unquantized model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forge.actors.peers import PlainVllm
from forge.bench import alternate
from forge.config import GrpoConfig
from forge.engine_vllm import expected_tensors, prepare_environment
from forge.files import scratch_folder
from forge.mesh import Part, spawn
from forge.model_folder import weight_map
from forge.quant import Quantization
from forge.quant.grid import scale_of_range
from forge.quant.pack import linear_shapes, num_bytes, pack
from forge.types import ActivationScale, Manifest, SamplingRequest, TensorSpec

SPEED_RUNS = 3
SPEED_REQUESTS = 32
SPEED_TOKENS = 32


@dataclass(kw_only=True, slots=True, frozen=True)
class StockScores:
    """What a stock engine says about a folder."""

    logprobs: list[list[float]]
    tokens_per_second: float | None = None
    unquantized_tokens_per_second: float | None = None


async def score_in_stock_vllm(
    config: GrpoConfig,
    folder: Path,
    sequences: Sequence[Sequence[int]],
    *,
    logs: Path,
    unquantized: Path | None = None,
) -> StockScores:
    """Load a folder in a fresh process as anyone would, without the network, and score given tokens.

    Args:
        unquantized: model folder to compare the speed with; None measures none.

    Raises:
        PartFailed: vLLM could not load or run it.
    """
    async with contextlib.AsyncExitStack() as stack:
        env = prepare_environment(config, stack.enter_context(scratch_folder()))
        parts: list[Part] = []

        async def stop() -> None:
            await asyncio.gather(*(p.stop() for p in parts))

        stack.push_async_callback(stop)
        for name, path in (("stock vllm", folder), ("stock vllm, unquantized", unquantized)):
            if path is None:
                continue
            parts.append(await spawn(name, PlainVllm, config, path, log_dir=logs, env=env))
        await asyncio.gather(*(p.call("setup") for p in parts))
        logprobs: list[list[float]] = await parts[0].call_one("score", [list(s) for s in sequences])
        if unquantized is None:
            return StockScores(logprobs=logprobs)
        requests = [
            SamplingRequest(
                token_ids=tuple(sequences[i % len(sequences)]),
                temperature=1.0,
                max_new_tokens=min(SPEED_TOKENS, config.model.max_len - max(map(len, sequences))),
                seed=i,
            )
            for i in range(SPEED_REQUESTS)
        ]

        async def speed(i: int) -> float:
            return await parts[i].call_one("tokens_per_second", requests)

        ours, theirs = await alternate(lambda: speed(0), lambda: speed(1), runs=SPEED_RUNS)
        return StockScores(
            logprobs=logprobs,
            tokens_per_second=sorted(ours)[len(ours) // 2],
            unquantized_tokens_per_second=sorted(theirs)[len(theirs) // 2],
        )


def live_version(
    config: GrpoConfig, folder: Path, scales: Mapping[str, ActivationScale] | None = None
) -> tuple[Manifest, dict[str, Tensor]]:
    """A folder's own weights as a published version of `config.quant`, for measurements without a trainer.

    Args:
        scales: of a static scheme; without them they cover [-8, 8], which is enough to measure speed.
    """
    from safetensors.torch import load_file

    quantization = Quantization.of(config.quant)
    assert quantization is not None
    served = getattr(torch, config.generator.dtype.value)
    plan = quantization.plan(linear_shapes(expected_tensors(folder, config.generator.dtype.value)))
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map(folder).values())):
        for name, weight in load_file(folder / shard).items():
            module = name.removesuffix(".weight")
            quantized = module in plan.quantized and module != name
            tensors |= pack(module, weight, quantization, served=served) if quantized else {name: weight.to(served)}
    specs = {n: TensorSpec(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    if scales is None and quantization.scheme.static:
        scales = dict.fromkeys(plan.quantized, scale_of_range(-8.0, 8.0))
    manifest = Manifest(
        version=1,
        tensors=specs,
        num_bytes=num_bytes(specs),
        changed_share=1.0,
        scheme=quantization.label,
        scales=scales or {},
    )
    return manifest, tensors
