"""Several ranks put shards, another process reads full tensors. Prints what it found.

python store_ranks.py RANKS shared|messages
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from forge import weights
from forge.actors.base import ForgeActor
from forge.digest import digest
from forge.engine_titan import leaves_a_rank_empty
from forge.errors import ForgeError, PartDied
from forge.mesh import concurrent_endpoint, current_rank, spawn
from forge.segments import Segment
from forge.types import Manifest, TensorSpec

TENSORS = {
    "uneven": ((7, 5), torch.float32),
    "wide": ((64, 1001), torch.bfloat16),
    "vector": ((10,), torch.float32),
    "one": ((1,), torch.bfloat16),
    "four of three": ((4, 2), torch.float32),
    "empty": ((0, 4), torch.float32),
}
STORE = "test-store"


def full(name: str, version: int) -> torch.Tensor:
    shape, dtype = TENSORS[name]
    generator = torch.Generator().manual_seed(version)
    return torch.randn(shape, generator=generator).to(dtype)


def manifest(version: int, names: list[str] | None = None) -> Manifest:
    specs = {
        n: TensorSpec(shape=TENSORS[n][0], dtype=str(TENSORS[n][1]).removeprefix("torch.")) for n in names or TENSORS
    }
    digests = {n: digest(full(n, version)) for n in specs}
    return Manifest(version=version, tensors=specs, num_bytes=0, changed_share=1.0, digests=digests)


class Writer(ForgeActor):
    def __init__(self, ranks: int, rendezvous: str) -> None:
        self.ranks, self.rendezvous = ranks, rendezvous

    @concurrent_endpoint
    async def setup(self) -> None:
        import torch.distributed as dist

        rank = current_rank().rank
        dist.init_process_group("gloo", init_method=f"file://{self.rendezvous}", rank=rank, world_size=self.ranks)

    @concurrent_endpoint
    async def put(self, version: int, segment: Segment | None, fault: str = "") -> dict[str, int]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (self.ranks,))
        shards: dict[str, torch.Tensor] = {}
        for name, (shape, _) in TENSORS.items():
            if not leaves_a_rank_empty(shape[0], self.ranks):
                shards[name] = distribute_tensor(full(name, version), mesh, [Shard(0)])
            elif current_rank().rank == 0:
                shards[name] = full(name, version)
        found = weights.digests(shards)
        if fault == "flipped bit" and current_rank().rank == self.ranks - 1:
            wide = shards["wide"]
            wide = getattr(wide, "_local_tensor", wide)
            wide.view(torch.int16)[-1, -1] ^= 1
        if fault == "stale" and current_rank().rank == 0:
            vector = shards["vector"]
            vector = getattr(vector, "_local_tensor", vector)
            vector.copy_(full("vector", version - 1)[: len(vector)])
        await weights.put(STORE, manifest(version), shards, segment)
        return found


class Reader(ForgeActor):
    @concurrent_endpoint
    async def get(self, version: int) -> dict[str, bool]:
        async with weights.reading(STORE, manifest(version)) as found:
            return {
                n: torch.equal(t, full(n, version)) and t.dtype is TENSORS[n][1] and t.is_contiguous()
                for n, t in found.items()
            }

    @concurrent_endpoint
    async def failure(self, version: int, keep: bool = False) -> str:
        """What reading a version raises.

        Args:
            keep: a tensor of it beyond the end of reading.
        """
        try:
            async with weights.reading(STORE, manifest(version)) as found:
                self.kept = list(found.values()) if keep else []
        except ForgeError as error:
            return str(error)
        return "nothing raised"

    @concurrent_endpoint
    async def hold(self, version: int) -> None:
        """Begin to read a version."""
        self.reading = weights.reading(STORE, manifest(version))
        self.held = await self.reading.__aenter__()

    @concurrent_endpoint
    async def release(self, version: int) -> bool:
        """End it; returns whether it is what it was."""
        same = all(torch.equal(t, full(n, version)) for n, t in self.held.items())
        await self.reading.__aexit__(None, None, None)
        return same

    @concurrent_endpoint
    async def keys(self) -> list[str]:
        import torchstore

        client = await torchstore.client(STORE)
        return sorted(await client.keys())


def segments() -> int:
    """Segments of shared memory that this process has made."""
    links = [os.readlink(x) for x in Path("/proc/self/fd").iterdir() if x.is_symlink()]
    return sum("memfd:forge-weights" in link for link in links)


async def main(ranks: int, shared: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        writer = await spawn("writer", Writer, ranks, str(logs / "rendezvous"), count=ranks, log_dir=logs)
        reader = await spawn("reader", Reader, log_dir=logs)
        volume = await spawn("volume", ForgeActor, log_dir=logs)
        store = weights.WeightStore(STORE, shared=shared)
        await store.open(volume.procs)
        await writer.call("setup")
        found: dict[str, Any] = {}

        async def publish(version: int, fault: str = "") -> list[dict[str, int]]:
            segment = store.segment_for(manifest(version))
            of_ranks = await writer.call("put", version, segment, fault)
            await store.commit(manifest(version), segment)
            return of_ranks

        for version in (1, 2):
            of_ranks = await publish(version)
            found["digests"] = weights.add_digests(of_ranks) == manifest(version).digests
        found["equal"] = [await reader.call_one("get", v) for v in (1, 2)]
        await reader.call_one("hold", 1)
        await store.free_before(2)
        found["keys"] = await reader.call_one("keys")
        found["freed"] = await reader.call_one("failure", 1)
        await publish(3)
        found["held"] = await reader.call_one("release", 1)
        for version, fault in ((4, "flipped bit"), (5, "stale")):
            await publish(version, fault)
            found[fault] = await reader.call_one("failure", version)
        found["kept"] = await reader.call_one("failure", 3, True)
        found["segments"] = []
        for version in range(6, 16):  # as a run goes on: one is live, the next arrives
            await publish(version)
            await store.free_before(version)
            found["segments"].append(segments())
        os.environ[weights.FRAME_LIMIT] = "100000"
        try:
            await weights.put(STORE, manifest(3), {"wide": full("wide", 3)}, None)
        except ForgeError as error:
            found["too_large"] = str(error)
        volume.kill()
        found["get from the dead"] = await reader.call_one("failure", 15)
        calls = {
            "free": store.free_before(99),
            "put": weights.put(STORE, manifest(99), {"one": full("one", 6)}, None),
        }
        for doing, call in calls.items():
            try:
                await call
            except PartDied as error:
                found[f"{doing} from the dead"] = str(error)
        for part in (writer, reader):
            await part.stop()
        return found


if __name__ == "__main__":
    print("RESULT" + json.dumps(asyncio.run(main(int(sys.argv[1]), sys.argv[2] == "shared"))))
