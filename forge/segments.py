"""Memory that the processes of one host share: a version's tensors in one segment, written once and mapped by readers.

    SegmentPool ── take(size) ──> Segment ── write(segment, parts)   each writer, its rows
         ^                           └────── mapped(segment)         each reader: a tensor without a copy, and a lease
         └── give_back(segment) ─────┘

A segment is anonymous memory (memfd_create(2)) of the process that owns the pool; others open it through
/proc/<pid>/fd. The kernel frees it with the last process that has it, however they end: nothing is left behind after
a SIGKILL, and no limit of /dev/shm applies (64 MB in a container by default).

A lease is a shared flock(2) that lives as long as a reader's mapping. The pool hands a segment out again only once it
holds the exclusive lock, so no reader ever sees the next version in place of its own; segments are used again because
touching fresh memory costs ten times what copying into warm memory does.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import math
import mmap
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forge.errors import PartFailed
from forge.types import TensorSpec

PART = "weight store"
"""What messages call it."""
ALIGNMENT = 64
"""Bytes; where a tensor may begin: a cache line, and a multiple of every dtype's size."""


@dataclass(slots=True, frozen=True)
class Segment:
    """Shared memory, as another process finds it."""

    path: str
    """/proc/<owner>/fd/<n>."""
    inode: int
    """Of the memory behind the path, which a closed and opened descriptor would change."""
    size: int
    """Bytes."""

    def open(self) -> int:
        """A descriptor of one's own.

        Raises:
            PartFailed: the owner has closed it, or is gone.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR)
        except OSError as error:
            raise PartFailed(PART, f"shared memory {self.path} cannot be opened: {error.strerror}") from None
        if os.fstat(descriptor).st_ino != self.inode:
            os.close(descriptor)
            raise PartFailed(PART, f"shared memory {self.path} is gone: its version was freed")
        return descriptor


@dataclass(slots=True)
class Lease:
    """A reader's hold on a segment: while its mapping lives, the segment is not written again."""

    segment: Segment
    _memory: mmap.mmap

    def end(self) -> None:
        """Unmap.

        Raises:
            PartFailed: a tensor of the segment is still held, and would change with the version that is written next.
        """
        for last in (False, True):
            try:
                self._memory.close()
            except BufferError:
                if last:
                    raise PartFailed(
                        PART, "weights were loaded by reference, not copied: tensors of shared memory are still held"
                    ) from None
                gc.collect()  # a cycle may be all that holds them
            else:
                return


@functools.cache
def here() -> str:
    """The host, and the process namespace on it, within which /proc/<pid>/fd means the same."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return platform.node()


def supported() -> bool:
    """Whether this system has anonymous shared memory that other processes can open."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def layout(specs: Mapping[str, TensorSpec]) -> tuple[dict[str, int], int]:
    """Where each tensor begins, in bytes, and the size of them all."""
    offsets: dict[str, int] = {}
    end = 0
    for name, spec in specs.items():
        offsets[name] = end
        size = math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def views(flat: Tensor, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """The tensors that lie in a segment, without copying.

    Args:
        flat: uint8 [size].
    """
    offsets, _ = layout(specs)
    found: dict[str, Tensor] = {}
    for name, spec in specs.items():
        dtype: torch.dtype = getattr(torch, spec.dtype)
        size = math.prod(spec.shape) * dtype.itemsize
        found[name] = flat[offsets[name] : offsets[name] + size].view(dtype).view(spec.shape)
    return found


def write(segment: Segment, parts: Iterable[tuple[int, Tensor]]) -> None:
    """Copy tensors of any device into a segment, each to begin at a byte offset."""
    flat = _writable(segment)
    for offset, tensor in parts:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        flat[offset : offset + data.numel()].copy_(data)


@functools.lru_cache(maxsize=8)  # a writer comes back to the same few segments; mapping them anew doubles its time
def _writable(segment: Segment) -> Tensor:
    descriptor = segment.open()
    try:
        memory = mmap.mmap(descriptor, segment.size)
    finally:
        os.close(descriptor)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))


def mapped(segment: Segment) -> Tensor:
    """A segment as a tensor, uint8 [size], without a copy; `tensor.lease` holds it.

    What a reader writes into it stays its own (copy on write). The lease ends with the last tensor that lies in it.

    Raises:
        PartFailed: the segment is gone, or being written with another version.
    """
    descriptor = segment.open()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # the mapping keeps a duplicate of the descriptor, and so the lock, until it is unmapped
        memory = mmap.mmap(descriptor, segment.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except BlockingIOError:
        raise PartFailed(PART, f"shared memory {segment.path} holds another version: this one was freed") from None
    finally:
        os.close(descriptor)
    tensor = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
    tensor.lease = Lease(segment, memory)  # type: ignore[attr-defined]
    return tensor


@dataclass(slots=True)
class SegmentPool:
    """The owner's side: makes segments, and uses them again when nobody reads them any more."""

    _free: list[tuple[Segment, int]] = field(default_factory=list)
    _taken: dict[Segment, int] = field(default_factory=dict)

    def take(self, size: int) -> Segment:
        """A segment of at least `size` bytes that no reader can open until `publish`."""
        fitting = sorted((s for s in self._free if s[0].size >= size), key=lambda s: s[0].size)
        for segment, descriptor in fitting:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # a reader still has it
            self._free.remove((segment, descriptor))
            self._taken[segment] = descriptor
            return segment
        descriptor = os.memfd_create("forge-weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(size, 1))
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        segment = Segment(f"/proc/{os.getpid()}/fd/{descriptor}", os.fstat(descriptor).st_ino, max(size, 1))
        self._taken[segment] = descriptor
        return segment

    def publish(self, segment: Segment) -> None:
        """Let readers in."""
        fcntl.flock(self._taken[segment], fcntl.LOCK_UN)

    def give_back(self, segment: Segment) -> None:
        """No new reader will come; those that have it may finish."""
        self._free.append((segment, self._taken.pop(segment)))

    def close(self) -> None:
        """Let go of all memory; readers keep what they have mapped."""
        for descriptor in [d for _, d in self._free] + list(self._taken.values()):
            os.close(descriptor)
        self._free.clear()
        self._taken.clear()

    def __len__(self) -> int:
        return len(self._free) + len(self._taken)
