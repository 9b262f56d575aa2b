"""Smoothing: outlier channels of activations moved into weights, without changing the function.

    RMSNorm weight / s ── q, k, v (gate, up) columns * s          up rows / s ── down columns * s

SmoothQuant (arXiv 2211.10438) chooses s = max|X|^a / max|W|^(1 - a) for every channel. Here s is rounded to a power
of two: products and quotients are then exact in bfloat16 and float32, and the smoothed model computes bit for bit what
the original computed, while its activations need fewer codes for the same error.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

PAIRS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
"""What produces a channel's values, and the layers that take it in."""
LARGEST_POWER = 8
"""Factors stay within 2^-8 and 2^8, so that nothing leaves bfloat16's range."""


def factors(largest: Tensor, weights: list[Tensor], exponent: float) -> Tensor:
    """Power-of-two factor of every channel, float32 [channels], with geometric mean about 1.

    Args:
        largest: max|X| of every channel over calibration tokens, [channels].
        weights: of the layers that take the channels in, each [outputs, channels].
    """
    tiny = torch.finfo(torch.float32).tiny
    column = torch.stack([w.float().abs().amax(0) for w in weights]).amax(0)
    log = exponent * largest.float().clamp(min=tiny).log2() - (1 - exponent) * column.clamp(min=tiny).log2()
    seen = (largest > 0) & (column > 0)  # a channel that is never used keeps factor 1
    if not seen.any():
        return torch.ones_like(largest, dtype=torch.float32)
    power = (log - log[seen].mean()).round().clamp(-LARGEST_POWER, LARGEST_POWER)
    return torch.where(seen, torch.exp2(power), torch.ones_like(power))


def smooth(tensors: MutableMapping[str, Tensor], largest: Mapping[str, Tensor], *, exponent: float) -> int:
    """Smooth a decoder's tensors in place.

    Args:
        tensors: all weights by Hugging Face name.
        largest: max|X| of every input channel of a linear layer, by module name; layers that are missing are skipped.
        exponent: 0 to 1; higher moves more from activations into weights.

    Returns:
        number of channels whose factor is not 1.
    """
    moved = 0
    blocks = sorted({n.rsplit(".", 2)[0] for n in tensors if n.endswith(".input_layernorm.weight")})
    for block in blocks:
        for source, takers in PAIRS:
            names = [f"{block}.{t}.weight" for t in takers]
            seen = largest.get(f"{block}.{takers[0]}")
            if seen is None:
                continue
            s = factors(seen, [tensors[n] for n in names], exponent)
            moved += int((s != 1).sum())
            for part in ("weight", "bias"):
                if (name := f"{block}.{source}.{part}") in tensors:
                    tensor = tensors[name]
                    wide = s if tensor.dim() == 1 else s[:, None]
                    tensors[name] = (tensor.float() / wide).to(tensor.dtype)
            for name in names:
                tensors[name] = (tensors[name].float() * s).to(tensors[name].dtype)
    return moved
