"""Observers and the gate: what poisons a calibration, what moves scales, when the run rolls back."""

from __future__ import annotations

import json
import math

import pytest
import torch

from forge.config import CalibrationConfig, RollbackConfig
from forge.quant.calibration import (
    Action,
    Gate,
    LayerMeasurement,
    Measurement,
    Observer,
    PolicyMeasurement,
    measure_layer,
)
from forge.types import ActivationScale

LAYER = "model.layers.0.mlp.up_proj"


def normal(seed: int, rows: int = 64, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)) * scale


def observed(*passes: torch.Tensor) -> Observer:
    observer = Observer()
    for x in passes:
        observer.update(x)
    return observer


def measured(*passes: torch.Tensor, live: ActivationScale | None = None, **more: object) -> Measurement:
    layer, scale = measure_layer(LAYER, observed(*passes), live=live, static=True, changed_codes_share=0.0)
    fields = {"rows": 64, "tokens": 640, "rows_refused": 0, "resampled": False} | more
    return Measurement(layers=(layer,), scales={LAYER: scale} if scale else {}, **fields)  # type: ignore[arg-type]


def gate(steps: int = 100, **rollback: object) -> Gate:
    return Gate(CalibrationConfig(), RollbackConfig(**rollback), static=True, steps=steps)  # type: ignore[arg-type]


def lossy(drop: float, live_drop: float | None = None, seed: int = 1) -> Measurement:
    policy = PolicyMeasurement(
        kl=0.01,
        greedy_reward=0.8 - drop,
        greedy_reward_unquantized=0.8,
        live_greedy_reward=None if live_drop is None else 0.8 - live_drop,
    )
    return measured(normal(seed), policy=policy)


def test_an_observer_knows_range_and_moments_of_all_passes() -> None:
    a, b = normal(1), normal(2, scale=3.0)
    observer = observed(a, b)
    values = torch.cat([a.flatten(), b.flatten()]).double()
    assert observer.low == float(values.min())
    assert observer.high == float(values.max())
    assert observer.std == pytest.approx(float(values.std(unbiased=False)), rel=1e-9)
    assert observer.largest is not None
    assert torch.equal(observer.largest, torch.maximum(a.abs().amax(0), b.abs().amax(0)))


def test_scales_cover_what_was_seen() -> None:
    x = normal(3)
    layer, scale = measure_layer(LAYER, observed(x), live=None, static=True, changed_codes_share=0.0)
    assert scale is not None
    assert (127 - scale.zero_point) * scale.scale >= float(x.max()) - scale.scale
    assert (-128 - scale.zero_point) * scale.scale <= float(x.min()) + scale.scale
    codes = (x / scale.scale + scale.zero_point).round().clamp(-128, 127)
    error = ((codes - scale.zero_point) * scale.scale - x).abs().mean()
    assert layer.mean_abs_error == pytest.approx(float(error), rel=1e-3)


def test_good_scales_are_accepted_and_numbered() -> None:
    g = gate()
    first = g.decide(measured(normal(1)))
    second = g.decide(measured(normal(2), live=g.scales[LAYER]))
    assert (first.action, first.scale_version, second.scale_version) == (Action.accept, 1, 2)
    assert second.scales == g.scales


def test_a_zero_point_that_moves_is_flagged() -> None:
    g = gate()
    g.decide(measured(normal(1)))
    decision = g.decide(measured(normal(2) + 2.0, live=g.scales[LAYER]))
    assert decision.accepted
    assert any("zero point of 1 layers moved" in r and LAYER in r for r in decision.reasons)


POISON = {
    "outliers": ([normal(1), normal(2), torch.cat([normal(3), torch.full((1, 32), 100.0)])], {}, "outliers: the range"),
    "all zero": ([torch.zeros(64, 32)], {}, "all zero"),
    "not finite": ([torch.full((4, 32), math.inf)], {}, "not finite"),
    "never seen": ([], {}, "never seen"),
    "one-token rows": ([normal(1)], {"rows": 0, "rows_refused": 64}, "64 rows had fewer than calibration.min_tokens=8"),
}


@pytest.mark.parametrize("name", POISON)
def test_a_poisoned_batch_is_rejected_with_the_reason_and_the_live_scales_stay(name: str) -> None:
    passes, more, reason = POISON[name]
    g = gate()
    live = g.decide(measured(normal(5), normal(6))).scales
    decision = g.decide(measured(*passes, live=live[LAYER], **more))
    assert decision.action is Action.reject
    assert any(reason in r for r in decision.reasons), decision.reasons
    assert decision.scale_version == 1
    assert g.scales == live


def test_outliers_in_every_pass_are_caught_by_the_live_range() -> None:
    poisoned = [normal(i) for i in range(3)]
    for x in poisoned:
        x[0, 0] = 100.0
    g = gate()
    g.decide(measured(normal(5)))
    assert g.decide(measured(*poisoned, live=g.scales[LAYER])).action is Action.reject


def test_a_policy_that_is_far_off_is_rejected() -> None:
    decision = gate().decide(measured(normal(1), policy=PolicyMeasurement(kl=0.9)))
    assert decision.action is Action.reject
    assert "KL from the unquantized policy is 0.900" in decision.reasons[0]
    nan = gate().decide(measured(normal(1), policy=PolicyMeasurement(kl=math.nan)))
    assert nan.action is Action.reject


def test_live_scales_that_lost_touch_are_reported() -> None:
    g = gate()
    g.decide(measured(normal(1)))
    decision = g.decide(measured(normal(2, scale=8.0), live=g.scales[LAYER], policy=PolicyMeasurement(live_kl=1.5)))
    assert any("the live scales are 1.500 nats" in r for r in decision.reasons)
    assert any("leave the live scales' range" in r for r in decision.reasons)


def test_an_accuracy_drop_rolls_back_and_then_switches_to_qat() -> None:
    g = gate(steps=100, patience=3)
    first = g.decide(lossy(0.0, seed=1)).scales
    g.decide(lossy(0.01, seed=2))
    assert g.scale_version == 2
    decisions = [g.decide(lossy(0.1, 0.1)) for _ in range(3)]
    assert [d.action for d in decisions] == [Action.rollback, Action.reject, Action.qat]
    assert decisions[0].rolled_back
    assert decisions[0].scale_version == 1
    assert decisions[0].scales == first
    assert "no earlier accepted scales" in " ".join(decisions[1].reasons)
    assert [d.qat_steps for d in decisions] == [0, 0, 10]
    assert g.rejected_in_a_row == 0


def test_a_drop_within_its_standard_error_does_not_count() -> None:
    policy = PolicyMeasurement(kl=0.01, greedy_reward=0.5, greedy_reward_unquantized=0.625, drop_error=0.125)
    assert gate().decide(measured(normal(1), policy=policy)).accepted
    policy = PolicyMeasurement(kl=0.01, greedy_reward=0.5, greedy_reward_unquantized=0.625, drop_error=0.05)
    assert not gate().decide(measured(normal(1), policy=policy)).accepted


def test_scales_that_were_provisional_are_not_rolled_back_to() -> None:
    g = gate()
    g.decide(lossy(0.0, seed=1))
    g.decide(lossy(0.0, seed=2))
    g.forget_earlier()
    decision = g.decide(lossy(0.1, 0.1))
    assert (decision.action, decision.scale_version) == (Action.reject, 2)


def test_a_drop_of_the_proposal_alone_keeps_the_live_scales() -> None:
    g = gate()
    g.decide(lossy(0.0))
    decision = g.decide(lossy(0.1, 0.01))
    assert (decision.action, decision.scale_version) == (Action.reject, 1)


def test_a_scheme_without_scales_is_measured_and_answered_by_qat() -> None:
    g = Gate(CalibrationConfig(), RollbackConfig(patience=1), static=False, steps=30)
    assert g.decide(lossy(0.0)).action is Action.measure
    decision = g.decide(lossy(0.5, 0.5))
    assert (decision.action, decision.qat_steps, decision.scales) == (Action.qat, 3, {})


def test_the_gate_survives_a_restart() -> None:
    g = gate()
    g.decide(lossy(0.0, seed=1))
    g.decide(lossy(0.0, seed=2))
    g.decide(lossy(0.5))
    again = gate()
    again.restore(json.loads(json.dumps(g.state())))
    assert again.scales == g.scales
    assert (again.scale_version, again.rejected_in_a_row) == (2, 1)
    assert again.decide(lossy(0.0, seed=3)).scale_version == 3


def test_a_measurement_of_an_unseen_layer_has_no_numbers() -> None:
    layer, scale = measure_layer(LAYER, Observer(), live=None, static=True, changed_codes_share=0.0)
    assert scale is None
    assert isinstance(layer, LayerMeasurement)
    assert math.isnan(layer.low)
