"""A trainer's step against Hugging Face's forward and backward passes on the same episodes, and the memory of both."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from functools import partial

from forge.actors.peers import PlainHuggingFace
from forge.actors.trainer import Trainer
from forge.bench import Claim, alternate, claim
from forge.benchmarks.workload import RUNS, made_up_groups, model_folder
from forge.config import GrpoConfig
from forge.files import scratch_folder
from forge.mesh import spawn

PROMPT_TOKENS, COMPLETION_TOKENS = 37, 16
"""As sums of two-digit numbers have with SmolLM2's tokens."""


async def run(config: GrpoConfig) -> list[Claim]:
    """Seconds of one rank's step, optimizer included, over those of Hugging Face's passes; peak memory over its."""
    config = replace(config, trainer=replace(config.trainer, ranks=1))
    folder = model_folder(config)
    groups = made_up_groups(config, prompt_tokens=PROMPT_TOKENS, completion_tokens=COMPLETION_TOKENS)
    claims: list[Claim] = []
    async with contextlib.AsyncExitStack() as stack:
        scratch = stack.enter_context(scratch_folder())
        rendezvous = str(scratch / "rendezvous")
        ours = await spawn("trainer", Trainer, config, folder, "", rendezvous, log_dir=scratch)
        stack.push_async_callback(ours.stop)
        await ours.call("setup")

        async def step() -> float:
            start = time.perf_counter()
            await ours.call("step", groups)
            return time.perf_counter() - start

        for padded, name in ((False, "the same packs"), (True, "the same padded batch")):
            peer = await spawn(f"hugging face on {name}", PlainHuggingFace, config, folder, log_dir=scratch)
            stack.push_async_callback(peer.stop)
            await peer.call("setup")
            sys.stderr.write(f"a step against hf forward and backward on {name}: {RUNS} runs of each, taking turns\n")
            passes = partial(peer.call_one, "forward_backward", groups, padded)
            mine, theirs = await alternate(step, passes, runs=RUNS)
            what = f"{config.model.name}, {config.prompts_per_step} groups of {config.group_size}"
            claims.append(claim(f"train: step over hf forward and backward on {name}, {what}", mine, theirs, "s"))
            own, its = await ours.call_one("memory"), await peer.call_one("memory")
            claims.append(claim(f"train: peak memory over hf on {name}", [own], [its], "GiB"))
            await peer.stop()
    return claims
