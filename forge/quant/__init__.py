"""Quantization: schemes, the grids they compute on, and the layers and tensors they make.

prepare (fake-quantized, trainable) ── convert (codes and scales) ── pack (tensors that travel) ── export (files)
"""

from forge.quant.scheme import GROUP_SIZES, SCHEMES, Activation, Format, Plan, Quantization, Scheme

__all__ = ["GROUP_SIZES", "SCHEMES", "Activation", "Format", "Plan", "Quantization", "Scheme"]
