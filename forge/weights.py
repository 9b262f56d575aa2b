"""Versioned weights through TorchStore: shards go in as they lie, full tensors come out, old versions are freed.

Within one host a version is one segment of shared memory under the key "<version>:<scheme>": every rank copies its
rows into it, then the controller puts it, and readers map it (`SegmentBuffer`, TorchStore's transport). Without shared
memory each tensor travels in messages, under "<version>:<scheme>/<name>", and TorchStore puts the shards together. A
key is written once and never overwritten, because TorchStore gives torn tensors to a reader of a key that is being
written. Which names a version holds is said by its manifest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import torch

from forge.digest import digest
from forge.errors import PartFailed, WeightsMismatch
from forge.mesh import FRAME_LIMIT, endpoint, names_the_dead
from forge.segments import PART, Lease, Segment, SegmentPool, here, layout, mapped, supported, views, write
from forge.types import Manifest

import torchstore  # isort: skip  (reads the environment that forge.mesh sets)
import torchstore.api  # isort: skip
from torchstore.transport.buffers import MonarchTransportBuffer  # isort: skip
from torchstore.transport.pipe import Pipe  # isort: skip

CONCURRENT_TRANSFERS = 32
"""Tensors in flight at once: TorchStore's cost is latency per tensor, so they overlap."""
FRAME_OVERHEAD = 64 * 2**10
"""Bytes of a message besides the tensor, generously."""


def _all_async(actor: type) -> dict[str, Any]:
    """The sync endpoints of an actor class, declared again as async ones."""

    def convert(method: Any) -> Any:
        @functools.wraps(method)
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *args, **kwargs)

        return endpoint(call)

    methods = {n: getattr(m, "_method", None) for n, m in inspect.getmembers(actor)}
    return {n: convert(m) for n, m in methods.items() if m is not None and not inspect.iscoroutinefunction(m)}


# TorchStore 0.1.2 mixes sync and async endpoints in its two actors, which Monarch 0.7 refuses. Subclasses take their
# place, by names that every process finds when it unpickles them.
StoreController = type(
    "StoreController", (torchstore.api.Controller,), {"__module__": __name__, **_all_async(torchstore.api.Controller)}
)
StoreVolume = type(
    "StoreVolume", (torchstore.api.StorageVolume,), {"__module__": __name__, **_all_async(torchstore.api.StorageVolume)}
)
torchstore.api.Controller = StoreController
torchstore.api.StorageVolume = StoreVolume


class SegmentBuffer(MonarchTransportBuffer):
    """TorchStore's transport: a tensor of shared memory goes by reference within a host, all else in messages.

    A process that writes into the buffer and one that reads from it are the client and the storage volume; which is
    which depends on the direction. On the volume the tensor that is stored is the mapping itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.client = here()
        self.segment: Segment | None = None

    async def write_from(self, tensor: torch.Tensor | None) -> None:
        lease: Lease | None = getattr(tensor, "lease", None)
        if tensor is None or lease is None:
            self.tensor = tensor
        elif self.client == here():
            self.segment = lease.segment
        else:
            self.tensor = tensor[:]  # without its lease, which is of this host

    async def read_into(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        if self.segment is None:
            return await super().read_into(tensor)
        return mapped(self.segment)

    def update(self, other_buffer: SegmentBuffer) -> None:
        super().update(other_buffer)
        self.segment = other_buffer.segment


Pipe.create_transport_buffer = lambda self: SegmentBuffer()


class WeightStore:
    """The controller's side: opens the store, makes room for versions, frees them, closes it.

    Args:
        name: unique to the run, so that two runs on one machine never meet.
        shared: whether writers share this host's memory; otherwise versions go in messages.
    """

    def __init__(self, name: str, *, shared: bool) -> None:
        self.name = name
        self._live: list[tuple[Manifest, Segment | None]] = []
        self._pool = SegmentPool() if shared and supported() else None

    async def open(self, procs: Any) -> None:
        """Start the store on a process mesh of one process."""
        with names_the_dead(PART, "open"):
            await torchstore.initialize(num_storage_volumes=1, store_name=self.name, mesh=procs)

    def segment_for(self, manifest: Manifest) -> Segment | None:
        """Where the ranks write a version; None: it goes in messages."""
        return None if self._pool is None else self._pool.take(layout(manifest.tensors)[1])

    async def commit(self, manifest: Manifest, segment: Segment | None) -> None:
        """Let readers have a version that every rank has written."""
        if self._pool is not None and segment is not None:
            self._pool.publish(segment)
            with names_the_dead(PART, "put"):
                await torchstore.put(manifest.key, mapped(segment), store_name=self.name)
        self._live.append((manifest, segment))

    async def free_before(self, version: int) -> None:
        """Delete every version older than `version`; call it when no reader will ask for them any more."""
        await self._free([x for x in self._live if x[0].version < version])

    async def free(self, manifest: Manifest) -> None:
        """Delete one published form of a version."""
        await self._free([x for x in self._live if x[0].key == manifest.key])

    async def _free(self, versions: list[tuple[Manifest, Segment | None]]) -> None:
        for manifest, segment in versions:
            self._live.remove((manifest, segment))
            keys = [manifest.key] if segment else [_key(manifest.key, n) for n in _stored(manifest)]
            with names_the_dead(PART, "delete"):
                await _gather(torchstore.delete(key, store_name=self.name) for key in keys)
            if self._pool is not None and segment is not None:
                self._pool.give_back(segment)

    def close(self) -> None:
        """Let go of the shared memory; the store itself ends with its process."""
        if self._pool is not None:
            self._pool.close()


async def put(store: str, manifest: Manifest, shards: Mapping[str, Any], segment: Segment | None) -> None:
    """Write this rank's shards of a version: DTensors sharded by rows, or whole tensors.

    Args:
        segment: from `WeightStore.segment_for`.

    Raises:
        PartFailed: a shard does not fit Monarch's frame limit, or the segment is gone.
    """
    if segment is not None:
        await asyncio.to_thread(_write, segment, manifest, shards)
        return
    limit = int(os.environ[FRAME_LIMIT])
    for name, shard in shards.items():
        size = _local(shard).nbytes
        if size + FRAME_OVERHEAD > limit:
            raise PartFailed(
                PART,
                f"{name} has a shard of {size} bytes and {FRAME_LIMIT}={limit} does not let it pass in one message: "
                "raise that environment variable or shard over more trainer.ranks",
            )
    # TorchStore cannot give back a tensor without elements; readers make those from the manifest.
    full = {name: shard for name, shard in shards.items() if shard.numel()}
    with names_the_dead(PART, "put"):
        await _gather(torchstore.put(_key(manifest.key, n), shard, store_name=store) for n, shard in full.items())


def _write(segment: Segment, manifest: Manifest, shards: Mapping[str, Any]) -> None:
    offsets, _ = layout(manifest.tensors)

    def offset(name: str, shard: Any) -> int:
        return offsets[name] + _first_row(shard) * math.prod(shard.shape[1:]) * shard.element_size()

    write(segment, ((offset(name, shard), _local(shard)) for name, shard in shards.items()))


@contextlib.asynccontextmanager
async def reading(store: str, manifest: Manifest) -> AsyncIterator[dict[str, Any]]:
    """All of a version as full tensors, in the manifest's order, whose digests were checked.

    They are emptied at the end: copy what is to stay.

    Raises:
        PartFailed: a tensor of the manifest is not in the store; or, at the end, one is still held.
        WeightsMismatch: a tensor is not what was published, also when it is read once more.
    """
    tensors, lease = await _read(store, manifest)
    damaged = await asyncio.to_thread(_damaged, manifest, tensors)
    if damaged:
        tensors, lease = await _read(store, manifest)
        damaged = await asyncio.to_thread(_damaged, manifest, tensors)
    if damaged:
        raise WeightsMismatch(
            PART,
            f"version {manifest.version} is not what was published: {len(damaged)} tensors have another digest, also "
            f"when read once more: {', '.join(damaged[:3])}; the version before it stays live",
        )
    try:
        yield tensors
    finally:
        tensors.clear()
    if lease is not None:  # after a failure its traceback holds tensors, and ends the lease with itself
        lease.end()


async def _read(store: str, manifest: Manifest) -> tuple[dict[str, Any], Lease | None]:
    """A version's tensors, and the lease on the memory they lie in when they were not copied."""
    names = _stored(manifest)
    with names_the_dead(PART, "get"):
        try:
            flat = await torchstore.get(manifest.key, store_name=store)
        except KeyError:
            flat = None  # in messages, or freed
        else:
            return views(flat, manifest.tensors), getattr(flat, "lease", None)
        try:
            found = await _gather(torchstore.get(_key(manifest.key, n), store_name=store) for n in names)
        except KeyError as error:
            reason = str(error).splitlines()[0][:300]
            raise PartFailed(PART, f"version {manifest.version} is not complete in the store: {reason}") from None
    by_name = dict(zip(names, found, strict=True))
    return {
        name: by_name[name] if name in by_name else torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for name, spec in manifest.tensors.items()
    }, None


def _damaged(manifest: Manifest, tensors: Mapping[str, Any]) -> list[str]:
    """Names of tensors that do not have the manifest's digest."""
    return [name for name, tensor in tensors.items() if digest(tensor) != manifest.digests.get(name)]


def digests(shards: Mapping[str, Any]) -> dict[str, int]:
    """Digest of each of a rank's shards: DTensors sharded by rows, or whole tensors."""
    return {name: digest(_local(shard), first_row=_first_row(shard)) for name, shard in shards.items()}


def add_digests(of_ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Digests of whole tensors from those of every rank's shards."""
    total: dict[str, int] = {}
    for one in of_ranks:
        for name, value in one.items():
            total[name] = (total.get(name, 0) + value) % 2**64
    return total


def _local(shard: Any) -> Any:
    """What this rank holds of a tensor."""
    return getattr(shard, "_local_tensor", shard)


def _first_row(shard: Any) -> int:
    """Where this rank's rows begin in the whole tensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(shard, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
    return int(offset[0])


def _stored(manifest: Manifest) -> list[str]:
    """Names of the tensors that have elements."""
    return [name for name, spec in manifest.tensors.items() if math.prod(spec.shape)]


def _key(key: str, name: str) -> str:
    return f"{key}/{name}"


async def _gather(transfers: Any) -> list[Any]:
    gate = asyncio.Semaphore(CONCURRENT_TRANSFERS)

    async def one(transfer: Any) -> Any:
        async with gate:
            return await transfer

    return list(await asyncio.gather(*map(one, transfers)))
