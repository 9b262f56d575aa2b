"""Rounding of float32 weights to the dtype that generators serve, so that small updates are not lost.

An Adam step of 1e-5 moves a weight by a small fraction of the distance between two neighbouring bfloat16 values.
Rounding to nearest then returns the old value for nearly every weight: the trainer's policy moves, the sampler's
does not, and the two drift apart (on SmolLM2 at 3e-5 the mean log-prob gap went from 0.03 to 0.47 nats in one step).

Here each weight has a threshold u in [0, 1) of its own, fixed for ever: it is rounded up when the fraction it has
climbed from the value below to the value above exceeds u. Over a tensor the mean of the rounded weights is the mean
of the exact ones (a dither, as in image quantization); a weight changes only when it crosses its threshold, so
nothing flickers from version to version; values that bfloat16 holds exactly stay as they are; and the result depends
on the weight and its place alone, not on ranks or history.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_BITS = 16  # a bfloat16 is the upper half of a float32
_CHUNK = 1 << 16
"""Elements rounded at once: the integer temporaries then stay in the cache."""


def _as_int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def thresholds(start: int, count: int, *, device: torch.device | None = None) -> Tensor:
    """Threshold of elements start … start + count - 1 of a tensor, as int32 in [0, 2^16).

    A Weyl sequence (multiples of the golden ratio) through one xor-shift round: evenly spread in any stretch, and
    without the sequence's lattice along rows.
    """
    first = (start + 2**31) % 2**32 - 2**31  # as int32: counting on past 2^31 wraps around
    index = torch.arange(count, dtype=torch.int32, device=device).add_(first)
    index *= _as_int32(0x9E3779B1)
    index ^= (index >> 15) & 0x1FFFF
    index *= _as_int32(0x85EBCA77)
    return (index >> _LOW_BITS).bitwise_and_(0xFFFF)


def dithered(weights: Tensor, *, offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A contiguous copy of `weights` on the CPU in `dtype`.

    Args:
        weights: float32, any shape, or already of `dtype`.
        offset: place of its first element within the whole tensor, when it is a shard of one.
        dtype: bfloat16 is dithered; float32 is copied.
    """
    if weights.dtype is dtype:
        return weights.detach().to(device="cpu", copy=True).contiguous()
    if weights.dtype is not torch.float32 or dtype is not torch.bfloat16:
        raise ValueError(f"dithered rounds float32 to bfloat16, got {weights.dtype} to {dtype}")
    flat = weights.detach().to("cpu").contiguous().view(-1)
    out = torch.empty(flat.shape, dtype=torch.bfloat16)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        bits = part.view(torch.int32) + thresholds(offset + start, part.numel())
        # The carry out of the low half is the rounding up; infinities and NaN have no room for it and stay.
        bits = torch.where(torch.isfinite(part), bits, part.view(torch.int32))
        out[start : start + _CHUNK] = (bits >> _LOW_BITS).to(torch.int16).view(torch.bfloat16)
    return out.view(weights.shape)
