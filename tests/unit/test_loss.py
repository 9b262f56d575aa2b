"""The loss against closed forms and a plain loop."""

import math
from dataclasses import replace

import pytest
import torch

from forge.config import AlgoConfig, Correction
from forge.loss import LossSettings, grpo_loss, loss_metrics, token_logprobs

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28, kl=0.0)
CORRECTIONS = [c for c in Correction if c is not Correction.clip]


def one(tokens: int) -> torch.Tensor:
    """So many tokens of one completion."""
    return torch.zeros(tokens, dtype=torch.int64)


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
    loss, _ = grpo_loss(lp, mu, ref, adv, settings=s, denominator=70, episode_N=one(50))
    assert float(loss) == pytest.approx(
        plain_loss(lp.tolist(), mu.tolist(), adv.tolist(), ref.tolist(), s, 70), rel=1e-9
    )


def test_on_policy_gradient_is_minus_advantage_over_the_global_count() -> None:
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = grpo_loss(
        lp, lp.detach(), torch.zeros(2), torch.tensor([1.5, -0.5]), settings=SETTINGS, denominator=4, episode_N=one(2)
    )
    loss.backward()
    assert lp.grad is not None
    assert lp.grad.tolist() == pytest.approx([-1.5 / 4, 0.5 / 4])


def test_packs_add_up_to_the_whole_batch() -> None:
    lp = -torch.rand(10, dtype=torch.float64)
    mu, adv, ref = lp - 0.1, torch.randn(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    whole, _ = grpo_loss(lp, mu, ref, adv, settings=SETTINGS, denominator=10, episode_N=one(10))
    parts = sum(
        float(
            grpo_loss(lp[i:j], mu[i:j], ref[i:j], adv[i:j], settings=SETTINGS, denominator=10, episode_N=one(j - i))[0]
        )
        for i, j in ((0, 3), (3, 10))
    )
    assert parts == pytest.approx(float(whole), rel=1e-12)


def test_stored_behaviour_logprobs_make_the_ratio() -> None:
    # sampler 0.7 nats lower: ratio e^0.7 = 2.0138 on every token, all outside the clip range
    lp = torch.full((6,), -1.0)
    _, sums = grpo_loss(lp, lp - 0.7, torch.zeros(6), torch.ones(6), settings=SETTINGS, denominator=6, episode_N=one(6))
    sums["entropy"] = torch.zeros(())
    metrics = loss_metrics({k: float(v) for k, v in sums.items()}, tokens=6, kl=0.0)
    assert metrics["ratio/mean"] == pytest.approx(2.01375, rel=1e-5)
    assert metrics["ratio/outside_clip"] == 1.0
    assert metrics["logprob_gap/mean"] == pytest.approx(0.7, rel=1e-6)


def test_effective_sample_share_is_one_on_policy_and_falls_with_uneven_ratios() -> None:
    def share(log_ratio: torch.Tensor) -> float:
        lp = torch.full((2,), -1.0)
        _, sums = grpo_loss(
            lp, lp - log_ratio, torch.zeros(2), torch.ones(2), settings=SETTINGS, denominator=2, episode_N=one(2)
        )
        sums["entropy"] = torch.zeros(())
        return loss_metrics({k: float(v) for k, v in sums.items()}, tokens=2, kl=0.0)["ratio/effective_sample_share"]

    assert share(torch.zeros(2)) == pytest.approx(1.0)
    # ratios 3 and 1: (3 + 1)^2 / (9 + 1) / 2 = 0.8
    assert share(torch.tensor([math.log(3.0), 0.0])) == pytest.approx(0.8)


def test_a_huge_ratio_stays_finite() -> None:
    lp = torch.tensor([0.0], requires_grad=True)
    loss, _ = grpo_loss(
        lp,
        torch.tensor([-1000.0]),
        torch.zeros(1),
        torch.tensor([-1.0]),
        settings=SETTINGS,
        denominator=1,
        episode_N=one(1),
    )
    loss.backward()
    assert torch.isfinite(loss)
    assert lp.grad is not None
    assert torch.isfinite(lp.grad).all()


@pytest.mark.parametrize("correction", list(Correction))
def test_no_trained_token_gives_zero_loss_and_no_nan(correction: Correction) -> None:
    empty = torch.zeros(0, requires_grad=True)
    s = replace(SETTINGS, correction=correction)
    loss, _ = grpo_loss(empty, empty, empty, empty, settings=s, denominator=0, episode_N=one(0))
    loss.backward()
    assert loss.item() == 0.0
    assert loss_metrics({}, tokens=0, kl=0.0)["loss/total"] == 0.0


def test_logprobs_are_taken_at_the_sampling_temperature() -> None:
    weight = torch.tensor([[2.0], [0.0]])
    lp, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([0]), temperature=2.0)
    # logits [2, 0], softmax([1, 0]) = [0.731059, 0.268941]
    assert lp.item() == pytest.approx(math.log(0.7310586), rel=1e-6)
    assert entropy.item() == pytest.approx(
        -(0.7310586 * math.log(0.7310586) + 0.2689414 * math.log(0.2689414)), rel=1e-6
    )


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
def test_chunks_of_rows_change_neither_values_nor_gradients(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 16, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(50, 16, generator=generator, dtype=torch.float64).requires_grad_()
    target = torch.randint(0, 50, (7,), generator=generator)
    upstream = torch.randn(7, generator=generator)
    plain = torch.log_softmax(hidden @ weight.t() / 0.7, -1)
    expected = plain.gather(-1, target[:, None]).squeeze(-1)
    (expected * upstream).sum().backward()

    own_hidden, own_weight = (t.detach().float().requires_grad_() for t in (hidden, weight))
    lp, entropy = token_logprobs(own_hidden, own_weight, target, temperature=0.7, chunk_bytes=rows * 4 * 50)
    (lp * upstream).sum().backward()
    assert torch.allclose(lp.double(), expected, atol=1e-5)
    assert torch.allclose(entropy.double(), -(plain.exp() * plain).sum(-1), atol=1e-5)
    assert not entropy.requires_grad
    for own, true in ((own_hidden, hidden), (own_weight, weight)):
        assert own.grad is not None
        assert true.grad is not None
        assert torch.allclose(own.grad.double(), true.grad, atol=1e-5)


def test_no_row_gives_no_logprob_and_no_gradient() -> None:
    weight = torch.ones(5, 2, requires_grad=True)
    lp, entropy = token_logprobs(torch.zeros(0, 2), weight, torch.zeros(0, dtype=torch.int64), temperature=1.0)
    lp.sum().backward()
    assert lp.shape == entropy.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(3, 8, generator=generator).bfloat16(),
        torch.randn(1000, 8, generator=generator).bfloat16(),
    )
    target = torch.tensor([1, 2, 3])
    lp, _ = token_logprobs(hidden, weight, target, temperature=1.0)
    exact = torch.log_softmax((hidden @ weight.t()).double(), -1).gather(-1, target[:, None]).squeeze(-1)
    assert lp.dtype is torch.float32
    assert torch.allclose(lp.double(), exact, atol=1e-5)


# ---- corrections for a sampler that is not the trainer ------------------------------------------------------------


def plain_weights(lp: list[float], mu: list[float], episode: list[int], s: LossSettings) -> tuple[list[float], int]:
    """Weight of each token's gradient, and how many tokens are truncated or masked."""
    weights, changed = [], 0
    for i in range(len(lp)):
        w = math.exp(lp[i] - mu[i])
        mine = [lp[j] - mu[j] for j in range(len(lp)) if episode[j] == episode[i]]
        if s.correction is Correction.tis:
            weight, touched = min(w, s.correction_high), w > s.correction_high
        elif s.correction is Correction.sequence_tis:
            product = 1.0
            for ratio in mine:
                product *= math.exp(ratio)
            weight, touched = min(product, s.correction_high), product > s.correction_high
        elif s.correction is Correction.icepop:
            touched = not s.correction_low <= w <= s.correction_high
            weight = 0.0 if touched else w
        else:
            mean = math.exp(sum(mine) / len(mine))
            touched = not s.correction_low <= mean <= s.correction_high
            weight = 0.0 if touched else w
        weights.append(weight)
        changed += touched
    return weights, changed


def off_policy() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """lp, mu, reference, advantage and episode of 90 tokens in 9 of 10 completions (the 4th has none in this pack),
    which drift from the sampler by different amounts and are not sorted."""
    generator = torch.Generator().manual_seed(0)
    episode = torch.tensor([e for e in range(10) if e != 3]).repeat(10)
    lp, ref = (-2 * torch.rand(90, generator=generator, dtype=torch.float64) for _ in range(2))
    drift = torch.linspace(-1.2, 1.2, 10, dtype=torch.float64)[episode]
    mu = lp - drift - 0.5 * torch.randn(90, generator=generator, dtype=torch.float64)
    advantage = torch.randn(90, generator=generator, dtype=torch.float64)
    return lp, mu, ref, advantage, episode


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.8, 1.25)])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_equals_a_plain_loop(correction: Correction, low: float, high: float, kl: float) -> None:
    lp, mu, ref, adv, episode = off_policy()
    s = replace(SETTINGS, kl=kl, correction=correction, correction_low=low, correction_high=high)
    weights, changed = plain_weights(lp.tolist(), mu.tolist(), episode.tolist(), s)
    assert 0 < changed < 90
    d = (lp - ref).tolist()
    value = sum(-w * a + kl * (math.exp(-x) + x - 1) for w, a, x in zip(weights, adv.tolist(), d, strict=True))
    gradient = [(-w * a + kl * (1 - math.exp(-x))) / 70 for w, a, x in zip(weights, adv.tolist(), d, strict=True)]
    leaf = lp.clone().requires_grad_()
    loss, sums = grpo_loss(leaf, mu, ref, adv, settings=s, denominator=70, episode_N=episode)
    loss.backward()
    assert loss.item() == pytest.approx(value / 70, rel=1e-9)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-15)
    assert sums["outside_clip"].item() == changed


def test_clipping_equals_a_plain_loop_in_its_gradient() -> None:
    lp, mu, ref, adv, episode = off_policy()
    leaf = lp.clone().requires_grad_()
    loss, _ = grpo_loss(leaf, mu, ref, adv, settings=SETTINGS, denominator=70, episode_N=episode)
    loss.backward()
    gradient = []
    for now, m, a in zip(lp.tolist(), mu.tolist(), adv.tolist(), strict=True):
        ratio = math.exp(now - m)
        stopped = (a > 0 and ratio > 1.28) or (a < 0 and ratio < 0.8)
        gradient.append(0.0 if stopped else -ratio * a / 70)
    assert 0.0 in gradient
    assert leaf.grad is not None
    assert leaf.grad.tolist() == pytest.approx(gradient, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_on_policy_every_correction_has_the_gradient_of_clip(correction: Correction) -> None:
    lp, _, ref, adv, episode = off_policy()
    gradients = []
    for c in (Correction.clip, correction):
        leaf = lp.clone().requires_grad_()
        s = replace(SETTINGS, kl=0.1, correction=c)
        loss, sums = grpo_loss(leaf, lp, ref, adv, settings=s, denominator=90, episode_N=episode)
        loss.backward()
        assert leaf.grad is not None
        assert sums["outside_clip"].item() == 0
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def test_masked_tokens_have_no_gradient_and_stay_in_the_denominator() -> None:
    # w of the tokens: 4, 1 | 0.25, 1, 1; geometric means: 2 (too much for 1.9) and 0.63
    lp = torch.full((5,), -1.0)
    mu = lp - torch.tensor([4.0, 1.0, 0.25, 1.0, 1.0]).log()
    episode = torch.tensor([0, 0, 1, 1, 1])
    expected = {
        Correction.icepop: [0.0, 1.0, 0.0, 1.0, 1.0],
        Correction.sequence_mask: [0.0, 0.0, 0.25, 1.0, 1.0],
        Correction.tis: [1.9, 1.0, 0.25, 1.0, 1.0],
        Correction.sequence_tis: [1.9, 1.9, 0.25, 0.25, 0.25],
    }
    for correction, weights in expected.items():
        leaf = lp.clone().requires_grad_()
        s = replace(SETTINGS, correction=correction, correction_low=0.5, correction_high=1.9)
        loss, _ = grpo_loss(leaf, mu, lp, -torch.ones(5), settings=s, denominator=5, episode_N=episode)
        loss.backward()
        assert leaf.grad is not None
        assert (5 * leaf.grad).tolist() == pytest.approx(weights, rel=1e-5)
        assert [g == 0 for g in leaf.grad.tolist()] == [w == 0 for w in weights]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
def test_a_huge_gap_stays_finite_with_every_correction(correction: Correction, gap: float) -> None:
    lp = torch.zeros(3, requires_grad=True)
    s = replace(SETTINGS, correction=correction)
    loss, sums = grpo_loss(
        lp, torch.full((3,), -gap), torch.zeros(3), torch.ones(3), settings=s, denominator=3, episode_N=one(3)
    )
    loss.backward()
    assert lp.grad is not None
    assert torch.isfinite(lp.grad).all()
    assert all(torch.isfinite(v) for v in sums.values())


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_packs_of_whole_completions_add_up_with_every_correction(correction: Correction) -> None:
    lp, mu, ref, adv, episode = off_policy()
    s = replace(SETTINGS, correction=correction)
    whole, _ = grpo_loss(lp, mu, ref, adv, settings=s, denominator=90, episode_N=episode)
    parts = 0.0
    for mine in (episode < 5, episode >= 5):  # a pack numbers its completions from 0
        numbered = episode[mine] - episode[mine].min()
        parts += grpo_loss(lp[mine], mu[mine], ref[mine], adv[mine], settings=s, denominator=90, episode_N=numbered)[
            0
        ].item()
    assert parts == pytest.approx(whole.item(), rel=1e-12)


@pytest.mark.parametrize("correction", list(Correction))
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_metrics_have_the_same_names_with_every_correction(correction: Correction, kl: float) -> None:
    lp, mu, ref, adv, episode = off_policy()
    s = replace(SETTINGS, kl=kl, correction=correction)
    _, sums = grpo_loss(lp, mu, ref, adv, settings=s, denominator=90, episode_N=episode)
    sums["entropy"] = torch.zeros(())
    metrics = loss_metrics({k: float(v) for k, v in sums.items()}, tokens=90, kl=kl)
    assert set(metrics) == {
        "loss/total",
        "loss/policy",
        "loss/tokens",
        "policy/entropy",
        "ratio/mean",
        "ratio/outside_clip",
        "ratio/effective_sample_share",
        "logprob_gap/mean",
        "logprob_gap/max",
        "logprob_gap/kl_sampler_trainer",
    } | ({"loss/kl_reference"} if kl else set())


def test_settings_are_those_of_the_configuration() -> None:
    config = AlgoConfig(
        clip_low=0.1, clip_high=0.3, kl=0.2, correction=Correction.icepop, correction_low=0.4, correction_high=3.0
    )
    assert LossSettings.of(config) == LossSettings(
        clip_low=0.1, clip_high=0.3, kl=0.2, correction=Correction.icepop, correction_low=0.4, correction_high=3.0
    )
