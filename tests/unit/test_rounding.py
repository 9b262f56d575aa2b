"""Dithered rounding against its definition."""

import math

import pytest
import torch

from forge.rounding import dithered, thresholds


def test_values_that_bfloat16_holds_stay_as_they_are() -> None:
    exact = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(dithered(exact.float()), exact)


def test_every_value_goes_to_a_neighbour() -> None:
    w = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    rounded = dithered(w).float()
    ulp = 2.0 ** (torch.floor(torch.log2(w.abs())) - 7)  # bfloat16 has 7 bits behind the leading one
    assert ((rounded - w).abs() < ulp).all()


@pytest.mark.parametrize("climb", [0.02, 0.1, 0.5, 0.9])
def test_the_share_rounded_up_is_the_fraction_climbed(climb: float) -> None:
    # between 1 and the next bfloat16, 1 + 2^-7
    w = torch.full((200_000,), 1.0 + climb * 2**-7)
    up = (dithered(w) > 1).float().mean().item()
    assert up == pytest.approx(climb, abs=4 * math.sqrt(climb * (1 - climb) / 200_000))


def test_a_small_update_survives_that_rounding_to_nearest_loses() -> None:
    w = torch.randn(576, 1536, generator=torch.Generator().manual_seed(2)).mul(0.05).bfloat16().float()
    step = 1e-5 * torch.randn(w.shape, generator=torch.Generator().manual_seed(3)).sign()
    x = torch.randn(1536, generator=torch.Generator().manual_seed(4)).sign()
    step = step.abs() * x  # an update that moves every output the same way, as a gradient step does
    true = (step.double() @ x.double()).mean()
    nearest = ((w + step).bfloat16().double() - w.double()) @ x.double()
    ours = (dithered(w + step).double() - w.double()) @ x.double()
    assert nearest.mean() < 0.6 * true
    assert ours.mean().item() == pytest.approx(true.item(), rel=0.02)


def test_shards_round_as_the_whole_does() -> None:
    w = torch.randn(7, 5, generator=torch.Generator().manual_seed(5))
    whole = dithered(w)
    assert torch.equal(torch.cat([dithered(w[:4]), dithered(w[4:], offset=4 * 5)]), whole)


def test_nothing_flickers_a_weight_changes_only_when_it_crosses_its_threshold() -> None:
    w = torch.full((10_000,), 1.0 + 0.3 * 2**-7)
    first, later = dithered(w), dithered(w + 0.1 * 2**-7)
    assert ((later - first) >= 0).all()
    assert (later != first).float().mean().item() == pytest.approx(0.1, abs=0.02)


def test_infinities_and_nan_stay() -> None:
    w = torch.tensor([math.inf, -math.inf, math.nan])
    rounded = dithered(w)
    assert rounded[0] == math.inf
    assert rounded[1] == -math.inf
    assert rounded[2].isnan()


def test_float32_is_copied() -> None:
    w = torch.randn(5)
    copy = dithered(w, dtype=torch.float32)
    assert torch.equal(copy, w)
    assert copy.data_ptr() != w.data_ptr()


def test_other_roundings_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        dithered(torch.randn(3), dtype=torch.float16)


def test_thresholds_are_even_along_rows_and_columns() -> None:
    u = thresholds(0, 576 * 576).view(576, 576).float() / 2**16
    assert (u.mean(0) - 0.5).abs().max() < 0.08
    assert (u.mean(1) - 0.5).abs().max() < 0.08
    assert abs(torch.corrcoef(torch.stack([u[:, :-1].flatten(), u[:, 1:].flatten()]))[0, 1]) < 0.02
