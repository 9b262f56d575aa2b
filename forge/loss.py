"""The GRPO loss and the statistics that show whether it can be trusted.

Shapes: N trained tokens of one pack, V vocabulary.
Symbols: lp log-prob under the trainer now, mu log-prob under the policy that sampled, A advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, which cannot overflow then (exp(20) is 5e8)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LossSettings:
    """The parts of the loss that a configuration chooses."""

    clip_low: float
    clip_high: float
    kl: float


def token_logprobs(logits_NV: Tensor, target_N: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, in float32 and at the sampling temperature.

    Args:
        logits_NV: any float dtype [N, V].
        target_N: int64 [N].

    Returns:
        logprobs float32 [N]; entropy float32 [N] in nats, detached.
    """
    logprobs_NV = torch.log_softmax(logits_NV.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return logprobs_NV.gather(-1, target_N[:, None]).squeeze(-1), entropy_N


def grpo_loss(
    lp_N: Tensor, mu_N: Tensor, reference_N: Tensor, advantage_N: Tensor, *, settings: LossSettings, denominator: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the clipped token losses over `denominator`, and sums for the metrics.

    L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(lp - mu) (PPO, arXiv 1707.06347; clip-higher
    from DAPO, arXiv 2503.14476), plus kl * k3 with k3 = exp(-d) + d - 1, d = lp - reference (Schulman, "Approximating
    KL divergence"). `denominator` counts the trained tokens of the whole batch over all ranks and micro-batches, so
    the gradients of packs and ranks simply add up to those of the token mean.

    Returns:
        scalar loss; sums (and maxima, under "max/…") of detached statistics, float32 scalars.
    """
    log_ratio = (lp_N - mu_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    policy = -torch.minimum(ratio * advantage_N, clipped * advantage_N)
    loss = policy.sum()
    sums: dict[str, Tensor] = {"policy": policy.detach().sum()}
    if settings.kl > 0:
        d = (lp_N - reference_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        k3 = (-d).exp() + d - 1
        loss = loss + settings.kl * k3.sum()
        sums["kl"] = k3.detach().sum()
    with torch.no_grad():
        gap = (lp_N - mu_N).abs()
        sums["ratio"] = ratio.sum()
        sums["ratio_squared"] = ratio.square().sum()
        sums["outside_clip"] = ((ratio < 1 - settings.clip_low) | (ratio > 1 + settings.clip_high)).float().sum()
        sums["logprob_gap"] = gap.sum()
        sums["sampler_kl"] = (ratio - 1 - log_ratio).sum()  # k3 estimate of KL(sampler || trainer)
        sums["max/logprob_gap"] = gap.max() if gap.numel() else gap.new_zeros(())
    return loss / max(denominator, 1), sums


def loss_metrics(sums: dict[str, float], *, tokens: int, kl: float) -> dict[str, float]:
    """Per-token means of the summed statistics. No trained token gives no metric but a loss of 0."""
    if tokens == 0:
        return {"loss/total": 0.0, "loss/policy": 0.0, "loss/tokens": 0.0}
    policy = sums["policy"] / tokens
    metrics = {
        "loss/total": policy + kl * sums.get("kl", 0.0) / tokens,
        "loss/policy": policy,
        "loss/tokens": float(tokens),
        "policy/entropy": sums["entropy"] / tokens,
        "ratio/mean": sums["ratio"] / tokens,
        "ratio/outside_clip": sums["outside_clip"] / tokens,
        "ratio/effective_sample_share": sums["ratio"] ** 2 / max(sums["ratio_squared"], 1e-30) / tokens,
        "logprob_gap/mean": sums["logprob_gap"] / tokens,
        "logprob_gap/max": sums["max/logprob_gap"],
        "logprob_gap/kl_sampler_trainer": sums["sampler_kl"] / tokens,
    }
    if "kl" in sums:
        metrics["loss/kl_reference"] = sums["kl"] / tokens
    return metrics
