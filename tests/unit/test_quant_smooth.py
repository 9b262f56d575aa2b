"""Smoothing changes ranges and no function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from forge.fetch import fetch
from forge.quant.smooth import factors, smooth


def test_factors_are_powers_of_two_and_follow_the_formula() -> None:
    largest = torch.tensor([64.0, 1.0, 1.0, 0.0])
    w = torch.full((3, 4), 0.5)
    s = factors(largest, [w], 0.5)
    # log2 of max|X|^0.5 / max|W|^0.5: 3.5, 0.5, 0.5; less their mean 1.5: 2, -1, -1; an unused channel keeps 1
    assert s.tolist() == [4.0, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smoothed_model_computes_exactly_the_same(dtype: torch.dtype) -> None:
    folder: Path = fetch("tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.arange(40)[None] * 7 % 500
    before = model(ids).logits
    tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    largest = {
        n: torch.rand(m.in_features, generator=generator) * 50
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    moved = smooth(tensors, largest, exponent=0.6)
    assert moved > 100
    model.load_state_dict(tensors, strict=False)
    assert torch.equal(model(ids).logits, before)
    assert not torch.equal(tensors["model.layers.0.input_layernorm.weight"], torch.ones(1))
