"""A version from the trainer's ranks to a process that reads it, against TorchStore's own path and a memcpy.

Then the whole way of a version, from optimizer step to live in an engine that samples meanwhile, with its parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from forge.actors.base import ForgeActor
from forge.actors.generator import Generator
from forge.actors.peers import StateDictTrainer, WeightReader
from forge.actors.remote import Learner
from forge.bench import Claim, alternate, claim
from forge.benchmarks.workload import RUNS, made_up_requests, model_folder
from forge.config import GrpoConfig
from forge.engine_vllm import prepare_environment
from forge.files import scratch_folder
from forge.mesh import spawn
from forge.types import Manifest
from forge.weights import WeightStore

RANKS = 2
STORE = "bench"


async def run(config: GrpoConfig) -> list[Claim]:
    """Seconds of a move over those of its peers; seconds that generation stands still over those of the whole way."""
    config = replace(config, trainer=replace(config.trainer, ranks=RANKS))
    folder = model_folder(config)
    async with contextlib.AsyncExitStack() as stack:
        scratch = stack.enter_context(scratch_folder())
        store = WeightStore(STORE, shared=True)
        stack.callback(store.close)
        volume = await spawn("weight store", ForgeActor, log_dir=scratch)
        stack.push_async_callback(volume.stop)
        rendezvous = str(scratch / "rendezvous")
        trainer = await spawn(
            "trainer", StateDictTrainer, config, folder, STORE, rendezvous, count=RANKS, log_dir=scratch
        )
        stack.push_async_callback(trainer.stop)
        reader = await spawn("reader", WeightReader, STORE, log_dir=scratch)
        stack.push_async_callback(reader.stop)
        await store.open(volume.procs)
        specs = (await trainer.call("setup"))[0]
        pinned = [r.token_ids for r in made_up_requests(config)[:2]]
        learner = Learner(trainer, store, specs, None, config.generator.dtype.value, pinned=pinned)
        staged = await learner.stage_forms(1, unquantized=False)
        versions = _versions(staged)

        async def move() -> float:
            manifest = next(versions)
            start = time.perf_counter()
            await learner.publish(manifest)
            await reader.call_one("read", manifest)
            seconds = time.perf_counter() - start
            await learner.free(manifest)
            return seconds

        async def default_path() -> float:
            key = f"state-dict-{next(versions).version}"
            start = time.perf_counter()
            await trainer.call("put_state_dict", key)
            await reader.call_one("get_state_dict", key)
            seconds = time.perf_counter() - start
            await reader.call_one("delete", key)
            return seconds

        async def memcpy() -> float:
            return await reader.call_one("memcpy", staged.num_bytes)

        size = f"{staged.num_bytes / 2**20:.0f} MiB of {config.model.name} from {RANKS} ranks to a process"
        claims = []
        for peer, name in ((default_path, "TorchStore's default path"), (memcpy, "one warm memcpy")):
            sys.stderr.write(f"moving a version against {name}: {RUNS} runs of each, taking turns\n")
            ours, theirs = await alternate(move, peer, runs=RUNS)
            claims.append(claim(f"weights: {size}, digests checked, over {name}", ours, theirs, "s"))
        await reader.stop()

        env = prepare_environment(config, scratch)
        generator = await spawn("generator 0", Generator, config, folder, STORE, 0, log_dir=scratch, env=env)
        stack.push_async_callback(generator.stop)
        await generator.call("setup")
        sampling = asyncio.create_task(_sample_for_ever(config, generator))
        stack.callback(sampling.cancel)
        sys.stderr.write(f"from trainer to live beside sampling: {RUNS} versions\n")
        parts = [await _go_live(learner, generator, next(versions).version) for _ in range(RUNS + 1)][1:]
        for name in parts[0]:
            sys.stderr.write(f"  {name.ljust(32)}{1000 * statistics.median(p[name] for p in parts):8.0f} ms\n")
        whole = [sum(p.values()) for p in parts]
        text = "weights: generation stands still (engine reload) over trainer to live as a whole"
        claims.append(claim(text, [p["engine reload"] for p in parts], whole, "s"))
    return claims


def _versions(manifest: Manifest) -> Iterator[Manifest]:
    """The same tensors under a new version each time."""
    version = manifest.version
    while True:
        yield replace(manifest, version=version)
        version += 1


async def _go_live(learner: Learner, generator, version: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """One version's way, in seconds by part."""
    start = time.perf_counter()
    manifest = await learner.stage_forms(version, unquantized=False)
    staged = time.perf_counter()
    await learner.publish(manifest)
    published = time.perf_counter()
    found = await generator.call_one("pull", manifest)
    live = time.perf_counter()
    await learner.free_before(version)
    parts = {
        "cast, digests, canary (trainer)": staged - start,
        "copy and commit": published - staged,
        "map and check digests": found["fetch"],
        "engine reload": found["swap"],
        "canary (engine, beside sampling)": found["canary_seconds"],
    }
    return parts | {"waiting for the engine's step": live - published - sum(list(parts.values())[2:])}


async def _sample_for_ever(config: GrpoConfig, generator) -> None:  # type: ignore[no-untyped-def]
    while True:
        await generator.call_one("generate", made_up_requests(config))
