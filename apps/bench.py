"""`forge bench NAME [key=value …]`: measure Forge against a peer or a limit, in one run; runs/bench/NAME.json."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from forge.bench import Claim, alternate, claim, table, write_claims
from forge.config import GrpoConfig, load_config
from forge.errors import RefusedInput

RUNS = 5


async def rollout(config: GrpoConfig) -> list[Claim]:
    """A generator of Forge, called from the controller, against plain vllm.LLM.generate on the same prompts."""
    import tempfile

    from forge.actors.generator import Generator
    from forge.actors.peers import PlainVllm
    from forge.engine_vllm import prepare_environment
    from forge.fetch import fetch
    from forge.mesh import spawn
    from forge.types import SamplingRequest

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
        requests = [
            SamplingRequest(
                token_ids=tuple((31 * i + 7 * j) % 500 + 100 for j in range(40)),
                temperature=1.0,
                max_new_tokens=64,
                seed=i,
                ignore_eos=True,
            )
            for i in range(config.episodes_per_step)
        ]

        async def forge() -> float:
            start = time.perf_counter()
            completions = await ours.call_one("generate", requests)
            return sum(len(c.token_ids) for c in completions) / (time.perf_counter() - start)

        async def plain() -> float:
            return await peer.call_one("tokens_per_second", requests)

        a, b = await alternate(forge, plain, runs=RUNS)
    text = f"rollout: Forge generator over plain vllm.LLM.generate, {config.model.name}, {len(requests)} prompts"
    return [claim(text, a, b, "tokens/s")]


BENCHMARKS = {"rollout": rollout}


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
