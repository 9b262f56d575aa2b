"""Mean |log-prob difference| of sampled tokens, engine to trainer: quantized over bf16, prepared over not."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.actors.calibrator import start_smoothed
from forge.actors.generator import Generator
from forge.actors.stock import live_version
from forge.bench import Claim, claim
from forge.config import GrpoConfig, QuantConfig
from forge.engine_vllm import prepare_environment
from forge.errors import ConfigError
from forge.files import scratch_folder
from forge.inputs import check_inputs
from forge.mesh import spawn
from forge.parity import gap as mean_gap
from forge.types import SamplingRequest


async def run(config: GrpoConfig) -> list[Claim]:
    """Three gaps as two ratios. Raises ConfigError without a scheme."""
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
        scratch = stack.enter_context(scratch_folder())

        async def sample(own: GrpoConfig, model: Path, *version: Any) -> tuple[list[Any], list[tuple[float, ...]]]:
            """Rows of token ids, and the log-probs that their completions were sampled with."""
            sys.stderr.write(
                f"sampling {len(prompts)} completions of {tokens} tokens: quant.scheme={own.quant.scheme}\n"
            )
            env = prepare_environment(own, scratch)
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
