"""The loss against closed forms and a plain loop."""

import math
from typing import Any

import pytest
import torch

from forge.config import Correction
from forge.loss import LossSettings, loss_metrics, token_logprobs
from forge.loss import grpo_loss as grpo_loss_of_episodes


def grpo_loss(lp: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of tokens that are all of one completion, unless the test says otherwise."""
    kwargs.setdefault("episode_N", torch.zeros(len(lp), dtype=torch.int64))
    return grpo_loss_of_episodes(lp, *args, **kwargs)


SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, kl=0.0)


def plain_loss(lp: list[float], mu: list[float], adv: list[float], ref: list[float], s: LossSettings, n: int) -> float:
    total = 0.0
    for now, m, a, r in zip(lp, mu, adv, ref, strict=True):
        ratio = math.exp(now - m)
        clipped = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
        d = now - r
        total += -min(ratio * a, clipped * a) + s.kl * (math.exp(-d) + d - 1)
    return total / n


@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_it_equals_a_plain_loop(kl: float) -> None:
    generator = torch.Generator().manual_seed(0)
    lp, mu, ref = (-2 * torch.rand(50, generator=generator, dtype=torch.float64) for _ in range(3))
    adv = torch.randn(50, generator=generator, dtype=torch.float64)
    s = LossSettings(clip_low=0.2, clip_high=0.28, kl=kl)
    loss, _ = grpo_loss(lp, mu, ref, adv, settings=s, denominator=70)
    assert float(loss) == pytest.approx(
        plain_loss(lp.tolist(), mu.tolist(), adv.tolist(), ref.tolist(), s, 70), rel=1e-9
    )


def test_on_policy_gradient_is_minus_advantage_over_the_global_count() -> None:
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = grpo_loss(lp, lp.detach(), torch.zeros(2), torch.tensor([1.5, -0.5]), settings=SETTINGS, denominator=4)
    loss.backward()
    assert lp.grad is not None
    assert lp.grad.tolist() == pytest.approx([-1.5 / 4, 0.5 / 4])


def test_packs_add_up_to_the_whole_batch() -> None:
    lp = -torch.rand(10, dtype=torch.float64)
    mu, adv, ref = lp - 0.1, torch.randn(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    whole, _ = grpo_loss(lp, mu, ref, adv, settings=SETTINGS, denominator=10)
    parts = sum(
        float(grpo_loss(lp[i:j], mu[i:j], ref[i:j], adv[i:j], settings=SETTINGS, denominator=10)[0])
        for i, j in ((0, 3), (3, 10))
    )
    assert parts == pytest.approx(float(whole), rel=1e-12)


def test_stored_behaviour_logprobs_make_the_ratio() -> None:
    # sampler 0.7 nats lower: ratio e^0.7 = 2.0138 on every token, all outside the clip range
    lp = torch.full((6,), -1.0)
    _, sums = grpo_loss(lp, lp - 0.7, torch.zeros(6), torch.ones(6), settings=SETTINGS, denominator=6)
    sums["entropy"] = torch.zeros(())
    metrics = loss_metrics({k: float(v) for k, v in sums.items()}, tokens=6, kl=0.0)
    assert metrics["ratio/mean"] == pytest.approx(2.01375, rel=1e-5)
    assert metrics["ratio/outside_clip"] == 1.0
    assert metrics["logprob_gap/mean"] == pytest.approx(0.7, rel=1e-6)


def test_effective_sample_share_is_one_on_policy_and_falls_with_uneven_ratios() -> None:
    def share(log_ratio: torch.Tensor) -> float:
        lp = torch.full((2,), -1.0)
        _, sums = grpo_loss(lp, lp - log_ratio, torch.zeros(2), torch.ones(2), settings=SETTINGS, denominator=2)
        sums["entropy"] = torch.zeros(())
        return loss_metrics({k: float(v) for k, v in sums.items()}, tokens=2, kl=0.0)["ratio/effective_sample_share"]

    assert share(torch.zeros(2)) == pytest.approx(1.0)
    # ratios 3 and 1: (3 + 1)^2 / (9 + 1) / 2 = 0.8
    assert share(torch.tensor([math.log(3.0), 0.0])) == pytest.approx(0.8)


def test_a_huge_ratio_stays_finite() -> None:
    lp = torch.tensor([0.0], requires_grad=True)
    loss, _ = grpo_loss(
        lp, torch.tensor([-1000.0]), torch.zeros(1), torch.tensor([-1.0]), settings=SETTINGS, denominator=1
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert lp.grad is not None
    assert torch.isfinite(lp.grad).all()


def test_no_trained_token_gives_zero_loss_and_no_nan() -> None:
    empty = torch.zeros(0, requires_grad=True)
    loss, _ = grpo_loss(empty, empty, empty, empty, settings=SETTINGS, denominator=0)
    loss.backward()
    assert loss.item() == 0.0
    assert loss_metrics({}, tokens=0, kl=0.0)["loss/total"] == 0.0


def test_logprobs_are_taken_at_the_sampling_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0]])
    lp, entropy = token_logprobs(logits, torch.tensor([0]), temperature=2.0)
    # softmax([1, 0]) = [0.731059, 0.268941]
    assert lp.item() == pytest.approx(math.log(0.7310586), rel=1e-6)
    assert entropy.item() == pytest.approx(
        -(0.7310586 * math.log(0.7310586) + 0.2689414 * math.log(0.2689414)), rel=1e-6
    )


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    lp, _ = token_logprobs(logits, torch.tensor([1, 2, 3]), temperature=1.0)
    exact = torch.log_softmax(logits.double(), -1).gather(-1, torch.tensor([[1], [2], [3]])).squeeze(-1)
    assert lp.dtype is torch.float32
    assert torch.allclose(lp.double(), exact, atol=1e-5)


RATIOS = [0.2, 0.9, 1.1, 3.0, 0.7, 2.5]
EPISODES = [0, 0, 0, 1, 1, 2]


def plain_weights(correction: Correction, *, low: float = 0.5, high: float = 2.0) -> list[float]:
    """Each token's weight by the definitions, one token after the other."""
    weights = []
    for ratio, episode in zip(RATIOS, EPISODES, strict=True):
        own = [r for r, e in zip(RATIOS, EPISODES, strict=True) if e == episode]
        product = math.prod(own)
        mean = product ** (1 / len(own))
        weights.append(
            {
                Correction.tis: min(ratio, high),
                Correction.sequence_tis: min(product, high),
                Correction.icepop: ratio if low <= ratio <= high else 0.0,
                Correction.sequence_mask: ratio if low <= mean <= high else 0.0,
            }[correction]
        )
    return weights


@pytest.mark.parametrize("correction", [c for c in Correction if c is not Correction.clip])
def test_corrections_weigh_the_gradient_as_defined(correction: Correction) -> None:
    lp = torch.tensor([-1.0, -0.5, -2.0, -1.5, -0.3, -0.9], requires_grad=True)
    mu = lp.detach() - torch.tensor(RATIOS).log()
    advantage = torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0, 2.0])
    settings = LossSettings(clip_low=0.2, clip_high=0.28, kl=0.0, correction=correction)
    loss, sums = grpo_loss(
        lp, mu, torch.zeros(6), advantage, settings=settings, denominator=6, episode_N=torch.tensor(EPISODES)
    )
    weights = plain_weights(correction)
    expected = -sum(w * float(a) for w, a in zip(weights, advantage, strict=True)) / 6
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert lp.grad is not None
    for found, w, a in zip(lp.grad.tolist(), weights, advantage.tolist(), strict=True):
        assert found == pytest.approx(-w * a / 6, rel=1e-5, abs=1e-7)
    assert (
        float(sums["outside_clip"]) == sum(abs(w - r) > 1e-6 for w, r in zip(weights, RATIOS, strict=True))
        or correction is Correction.sequence_tis
    )


@pytest.mark.parametrize("correction", list(Correction))
def test_on_policy_every_correction_is_the_plain_policy_gradient(correction: Correction) -> None:
    lp = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    settings = LossSettings(clip_low=0.2, clip_high=0.28, kl=0.0, correction=correction)
    loss, _ = grpo_loss(
        lp, lp.detach(), torch.zeros(3), torch.tensor([1.0, -1.0, 2.0]), settings=settings, denominator=3
    )
    loss.backward()
    assert lp.grad is not None
    assert torch.allclose(lp.grad, torch.tensor([-1 / 3, 1 / 3, -2 / 3]))
