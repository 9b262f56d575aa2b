"""Digests of tensors that shards can be summed to, so that no rank needs the whole tensor.

    digest = sum over words i of  word[i] * M^i   mod 2^64

Each word's factor is odd, so a change of one word always changes the sum, by whatever bits; factors differ, so words
that trade places do, too. It guards against faults (a flipped bit, a lost, stale or misplaced shard), not against
someone who means to deceive.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

M = 0x9E3779B97F4A7C15
"""Without pattern (2^64 over the golden ratio), and 5 mod 8: its powers come again only after 2^62 words."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROW = 2**10
CHUNK = 2**20
"""Words at a time, which bounds memory."""


def digest(tensor: Tensor, *, first_row: int = 0) -> int:
    """Digest of a tensor, or of some of its rows; 0 to 2^64 - 1. Digests of its shards add up, mod 2^64, to its own.

    Args:
        tensor: [rows, ...] of any dtype.
        first_row: index of its first row in the whole tensor.
    """
    flat = tensor.detach().reshape(-1)
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    size = 8 if row_bytes % 8 == 0 else tensor.element_size()  # of whole rows alone, so all shards choose the same
    if flat.storage_offset() * tensor.element_size() % size:
        flat = flat.clone()
    words = flat.view(WORDS[size])
    start = first_row * row_bytes // size
    total = 0
    for at in range(0, words.numel(), CHUNK):
        part = words[at : at + CHUNK].long()
        if missing := -part.numel() % ROW:
            part = torch.nn.functional.pad(part, (0, missing))
        rows = part.view(-1, ROW)
        within, of_rows = _powers(1, ROW).to(part.device), _powers(ROW, len(rows)).to(part.device)
        # a product of integer matrices passes over memory once, but CUDA has none
        sums = (rows * within).sum(1) if part.is_cuda else rows @ within
        total += int((sums * of_rows).sum()) * pow(M, start + at, 2**64)
    return total % 2**64


@functools.lru_cache(maxsize=64)
def _powers(step: int, count: int) -> Tensor:
    """M^(step * i) mod 2^64 for i below `count`, as int64 holds them."""
    factor, power, found = pow(M, step, 2**64), 1, []
    for _ in range(count):
        found.append(power - 2**64 if power >= 2**63 else power)
        power = power * factor % 2**64
    return torch.tensor(found, dtype=torch.int64)
