"""Versioned weights through TorchStore: shards go in as they lie, full tensors come out, old versions are freed.

A version's tensors have keys "<version>:<scheme>/<name>"; a key is written once and never overwritten, because
TorchStore gives torn tensors to a reader of a key that is being written. Which names a version holds is said by its
manifest.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from forge.digest import digest
from forge.errors import PartFailed, WeightsMismatch
from forge.mesh import FRAME_LIMIT, endpoint, names_the_dead
from forge.types import Manifest

import torchstore  # isort: skip  (reads the environment that forge.mesh sets)
import torchstore.api  # isort: skip

PART = "weight store"
"""What messages call it."""
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


class WeightStore:
    """The controller's side: opens the store, frees versions, closes it.

    Args:
        name: unique to the run, so that two runs on one machine never meet.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._live: list[Manifest] = []

    async def open(self, procs: Any) -> None:
        """Start the store on a process mesh of one process."""
        with names_the_dead(PART, "open"):
            await torchstore.initialize(num_storage_volumes=1, store_name=self.name, mesh=procs)

    def committed(self, manifest: Manifest) -> None:
        """Note a version whose shards are all in the store."""
        self._live.append(manifest)

    async def free_before(self, version: int) -> None:
        """Delete every version older than `version`; call it when no reader uses them any more."""
        await self._free([m for m in self._live if m.version < version])

    async def free(self, manifest: Manifest) -> None:
        """Delete one published form of a version."""
        await self._free([m for m in self._live if m.key == manifest.key])

    async def _free(self, manifests: list[Manifest]) -> None:
        for manifest in manifests:
            self._live.remove(manifest)
            with names_the_dead(PART, "delete"):
                await _gather(torchstore.delete(_key(manifest.key, n), store_name=self.name) for n in _stored(manifest))

    async def close(self) -> None:
        """Drop everything."""
        await torchstore.shutdown(self.name)


async def put(store: str, key: str, shards: Mapping[str, Any]) -> None:
    """Write this rank's shards (DTensors) of a version under its manifest's key.

    Raises:
        PartFailed: a shard does not fit Monarch's frame limit.
    """
    limit = int(os.environ[FRAME_LIMIT])
    for name, shard in shards.items():
        size = getattr(shard, "_local_tensor", shard).nbytes
        if size + FRAME_OVERHEAD > limit:
            raise PartFailed(
                PART,
                f"{name} has a shard of {size} bytes and {FRAME_LIMIT}={limit} does not let it pass in one message: "
                "raise that environment variable or shard over more trainer.ranks",
            )
    # TorchStore cannot give back a tensor without elements; readers make those from the manifest.
    full = {name: shard for name, shard in shards.items() if shard.numel()}
    with names_the_dead(PART, "put"):
        await _gather(torchstore.put(_key(key, name), shard, store_name=store) for name, shard in full.items())


async def get(store: str, manifest: Manifest) -> dict[str, Any]:
    """Read all of a version as full tensors, in the manifest's order, and check their digests.

    Raises:
        PartFailed: a tensor of the manifest is not in the store.
        WeightsMismatch: a tensor is not what was published, also when it is read once more.
    """
    tensors = await _read(store, manifest, _stored(manifest))
    damaged = await asyncio.to_thread(_damaged, manifest, tensors)
    if damaged:
        tensors |= await _read(store, manifest, damaged)
        damaged = await asyncio.to_thread(_damaged, manifest, {n: tensors[n] for n in damaged})
    if damaged:
        raise WeightsMismatch(
            PART,
            f"version {manifest.version} is not what was published: {len(damaged)} tensors have another digest, also "
            f"when read once more: {', '.join(damaged[:3])}; the version before it stays live",
        )
    return {
        name: tensors[name] if name in tensors else torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for name, spec in manifest.tensors.items()
    }


async def _read(store: str, manifest: Manifest, names: list[str]) -> dict[str, Any]:
    try:
        with names_the_dead(PART, "get"):
            found = await _gather(torchstore.get(_key(manifest.key, n), store_name=store) for n in names)
    except KeyError as error:
        reason = str(error).splitlines()[0][:300]
        raise PartFailed(PART, f"version {manifest.version} is not complete in the store: {reason}") from None
    return dict(zip(names, found, strict=True))


def _damaged(manifest: Manifest, tensors: Mapping[str, Any]) -> list[str]:
    """Names of tensors that do not have the manifest's digest."""
    return [name for name, tensor in tensors.items() if digest(tensor) != manifest.digests.get(name)]


def digests(shards: Mapping[str, Any]) -> dict[str, int]:
    """Digest of each of a rank's shards: DTensors sharded by rows, or whole tensors."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: dict[str, int] = {}
    for name, shard in shards.items():
        first = 0
        if isinstance(shard, DTensor):
            _, offset = compute_local_shape_and_global_offset(shard.shape, shard.device_mesh, shard.placements)
            first = offset[0]
        found[name] = digest(getattr(shard, "_local_tensor", shard), first_row=first)
    return found


def add_digests(of_ranks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Digests of whole tensors from those of every rank's shards."""
    total: dict[str, int] = {}
    for one in of_ranks:
        for name, value in one.items():
            total[name] = (total.get(name, 0) + value) % 2**64
    return total


def _stored(manifest: Manifest) -> list[str]:
    return [name for name, spec in manifest.tensors.items() if math.prod(spec.shape)]


def _key(key: str, name: str) -> str:
    return f"{key}/{name}"


async def _gather(transfers: Any) -> list[Any]:
    gate = asyncio.Semaphore(CONCURRENT_TRANSFERS)

    async def one(transfer: Any) -> Any:
        async with gate:
            return await transfer

    return list(await asyncio.gather(*map(one, transfers)))
