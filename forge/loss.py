"""The GRPO loss and the statistics that show whether it can be trusted.

Shapes: N trained tokens of one pack, C of them at a time, D hidden size, V vocabulary.
Symbols: lp log-prob under the trainer now, mu log-prob under the policy that sampled, A advantage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from forge.config import AlgoConfig, Correction

CHUNK_BYTES = 2**28
"""float32 logits that are computed at once."""
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, which cannot overflow then (exp(20) is 5e8)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LossSettings:
    """The parts of the loss that a configuration chooses."""

    clip_low: float
    clip_high: float
    kl: float
    correction: Correction = Correction.clip
    correction_low: float = 0.5
    correction_high: float = 2.0

    @classmethod
    def of(cls, config: AlgoConfig) -> LossSettings:
        """The loss that a configuration asks for."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls)})


def token_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, temperature: float, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, in float32 and at the sampling temperature.

    Logits [N, V] are never whole in memory: rows are computed in chunks, and again for the gradient.

    Args:
        hidden_ND: any float dtype [N, D], what the head sees.
        weight_VD: of the head, in the same dtype.
        target_N: int64 [N].
        chunk_bytes: float32 logits at a time.

    Returns:
        logprobs float32 [N]; entropy float32 [N] in nats, detached.
    """
    rows = max(1, chunk_bytes // (4 * len(weight_VD)))
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(hidden_ND, weight_VD, target_N, temperature, rows)  # type: ignore[no-untyped-call]
    return found


class _TokenLogprobs(torch.autograd.Function):
    """d logprob / d logit = (1[target] - softmax) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = hidden_ND.new_empty(len(hidden_ND), dtype=torch.float32)
        norm_N, entropy_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for start in range(0, len(hidden_ND), rows):
            c = slice(start, start + rows)
            logprobs_CV = _logits(hidden_ND[c], weight_VD, temperature)
            norm_N[c] = torch.logsumexp(logprobs_CV, -1)
            logprobs_CV -= norm_N[c, None]
            logprobs_N[c] = logprobs_CV.gather(-1, target_N[c, None]).squeeze(-1)
            entropy_N[c] = -torch.linalg.vecdot(logprobs_CV.exp(), logprobs_CV)
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, norm_N)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_ND, weight_VD, target_N, norm_N = ctx.saved_tensors
        grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD, dtype=torch.float32)
        for start in range(0, len(hidden_ND), ctx.rows):
            c = slice(start, start + ctx.rows)
            grad_CV = _logits(hidden_ND[c], weight_VD, ctx.temperature).sub_(norm_N[c, None]).exp_()
            grad_CV.scatter_add_(-1, target_N[c, None], torch.full_like(target_N[c, None], -1, dtype=torch.float32))
            grad_CV.mul_(grad_N[c, None] / -ctx.temperature)
            grad_CV = grad_CV.to(weight_VD.dtype)
            torch.mm(grad_CV, weight_VD, out=grad_hidden_ND[c])
            grad_weight_VD += torch.mm(grad_CV.t(), hidden_ND[c])
        return grad_hidden_ND, grad_weight_VD.to(weight_VD.dtype), None, None, None


def _logits(hidden_CD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """float32 [C, V]."""
    logits_CV = torch.mm(hidden_CD, weight_VD.t()).float()
    return logits_CV.div_(temperature) if temperature != 1.0 else logits_CV


def grpo_loss(
    lp_N: Tensor,
    mu_N: Tensor,
    reference_N: Tensor,
    advantage_N: Tensor,
    *,
    settings: LossSettings,
    denominator: int,
    episode_N: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the token losses over `denominator`, and sums for the metrics.

    With correction=clip: L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(lp - mu) (PPO, arXiv
    1707.06347; clip-higher from DAPO, arXiv 2503.14476). Otherwise the policy that trains and the one that sampled are
    kept apart: L = -weight(exp(lp - mu)) rho A with rho = exp(lp - old), weight detached. Forge takes one optimizer
    step a batch, so old is lp itself: rho is 1 and carries the gradient, and no second forward pass is needed.
    Plus kl * k3 with k3 = exp(-d) + d - 1, d = lp - reference (Schulman, "Approximating KL divergence").
    `denominator` counts the trained tokens of the whole batch over all ranks and micro-batches, so the gradients of
    packs and ranks simply add up to those of the token mean. A token that a correction masks stays in it: its weight
    is 0.

    Args:
        episode_N: int64 [N], which completion of the pack a token belongs to.

    Returns:
        scalar loss; sums (and maxima, under "max/…") of detached statistics, float32 scalars.
    """
    log_ratio = (lp_N - mu_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    if settings.correction is Correction.clip:
        clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        policy = -torch.minimum(ratio * advantage_N, clipped * advantage_N)
        changed = (ratio < 1 - settings.clip_low) | (ratio > 1 + settings.clip_high)
    else:
        weight, changed = importance_weight(log_ratio.detach(), episode_N, settings)
        policy = -weight * (lp_N - lp_N.detach()).exp() * advantage_N
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
        sums["outside_clip"] = changed.float().sum()
        sums["logprob_gap"] = gap.sum()
        sums["sampler_kl"] = (ratio - 1 - log_ratio).sum()  # k3 estimate of KL(sampler || trainer)
        sums["max/logprob_gap"] = gap.max() if gap.numel() else gap.new_zeros(())
    return loss / max(denominator, 1), sums


def importance_weight(log_ratio_N: Tensor, episode_N: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Weight of each token's gradient, and where it is not plainly w = exp(log_ratio).

    Truncated importance sampling (arXiv 1312.0904's truncation, applied to rollout mismatch as "TIS" by verl and
    others); IcePop masks instead of truncating; sequence_mask keeps completions whose geometric mean of w is within
    the bounds, tokens weighted by w.

    Returns:
        weight float32 [N]; changed bool [N]: truncated or masked.
    """
    low, high = settings.correction_low, settings.correction_high
    w = log_ratio_N.exp()
    if settings.correction is Correction.tis:
        return w.clamp(max=high), w > high
    if settings.correction is Correction.icepop:
        inside = (w >= low) & (w <= high)
        return w * inside, ~inside
    episodes = int(episode_N.max()) + 1 if episode_N.numel() else 0
    total = log_ratio_N.new_zeros(episodes).index_add_(0, episode_N, log_ratio_N)
    if settings.correction is Correction.sequence_tis:
        product = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[episode_N]
        return product.clamp(max=high), product > high
    count = torch.bincount(episode_N, minlength=episodes).clamp(min=1)
    mean = (total / count).exp()[episode_N]
    inside = (mean >= low) & (mean <= high)
    return w * inside, ~inside


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
