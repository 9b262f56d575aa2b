"""A generator of Forge, called from the controller, against plain vllm.LLM.generate on the same prompts."""

from __future__ import annotations

import contextlib
import time

from forge.actors.generator import Generator
from forge.actors.peers import PlainVllm
from forge.bench import Claim, alternate, claim
from forge.benchmarks.workload import RUNS, made_up_requests, model_folder
from forge.config import GrpoConfig
from forge.engine_vllm import prepare_environment
from forge.files import scratch_folder
from forge.mesh import spawn


async def run(config: GrpoConfig) -> list[Claim]:
    """Tokens a second of both."""
    folder = model_folder(config)
    async with contextlib.AsyncExitStack() as stack:
        logs = stack.enter_context(scratch_folder())
        env = prepare_environment(config, logs)
        ours = await spawn("generator 0", Generator, config, folder, "", 0, log_dir=logs, env=env)
        stack.push_async_callback(ours.stop)
        peer = await spawn("plain vllm", PlainVllm, config, folder, log_dir=logs, env=env)
        stack.push_async_callback(peer.stop)
        await ours.call("setup")
        await peer.call("setup")
        requests = made_up_requests(config)

        async def forge() -> float:
            start = time.perf_counter()
            completions = await ours.call_one("generate", requests)
            return sum(len(c.token_ids) for c in completions) / (time.perf_counter() - start)

        async def plain() -> float:
            return await peer.call_one("tokens_per_second", requests)

        a, b = await alternate(forge, plain, runs=RUNS)
    text = f"rollout: Forge generator over plain vllm.LLM.generate, {config.model.name}, {len(requests)} prompts"
    return [claim(text, a, b, "tokens/s")]
