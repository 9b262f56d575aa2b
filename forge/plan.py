"""What a configuration will start, before anything is: processes, batch arithmetic, age bound, memory. Without torch.

Memory of a process is an estimate of its peak, within a fifth of what docs/log.md measured: parameters with what hangs
on them, the logits and activations of the largest batch, and what its libraries take when they are imported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forge.config import Device, GrpoConfig
from forge.files import read_json
from forge.model_folder import read_header, weight_map
from forge.quant import Plan

GIB = 2**30
LIBRARIES_GIB = {"trainer": 0.7, "generator": 1.4, "reference": 0.7, "calibrator": 0.7, "reward": 0.5, "store": 0.5}
"""Resident memory of a part that has loaded no model, as measured on x86-64 Linux."""
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGIT_COPIES = 3
"""float32 copies of the logits that are alive at once: logits, log-softmax and gradient."""
PROMPT_TOKENS = 64
"""Length that prompts are taken to have; no dataset is read."""
STORED_COPIES = 4
"""Of the largest published form, in the store: two versions, and the messages that one arrives and leaves in."""
SERVED_COPIES = 5
"""Of each form of the weights in a generator: as read, live, packed for the kernels, arriving, and its messages."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """A model in numbers, from the headers of its files."""

    parameters: int
    """Elements of all tensors, a tied head counted once."""
    linear: int
    """Elements of the quantized linear layers; 0 without quantization."""
    vocabulary: int
    hidden: int
    layers: int


@dataclass(kw_only=True, slots=True, frozen=True)
class PlannedPart:
    """One kind of process."""

    name: str
    processes: int
    where: str
    """"cpu", or which GPUs of the host in order of starting."""
    gib: float | None
    """Estimated peak of one process; None where the model is not at hand."""


def sizes(folder: Path, plan: Plan | None) -> Sizes:
    """Read a checked model folder's headers."""
    config = read_json(folder / "config.json")
    where = weight_map(folder)
    headers = {shard: read_header(folder / shard) for shard in set(where.values())}
    elements = {n: math.prod(headers[shard][n]["shape"]) for n, shard in where.items()}
    if config.get("tie_word_embeddings", False):
        elements.pop("lm_head.weight", None)
    return Sizes(
        parameters=sum(elements.values()),
        linear=sum(elements[f"{n}.weight"] for n in plan.quantized) if plan is not None else 0,
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
    )


def parts(config: GrpoConfig, model: Sizes | None, bits: int = 16) -> list[PlannedPart]:
    """Every process of the run but the controller, in order of starting.

    Args:
        model: None where it is not at hand; parts then have no estimate.
        bits: of a quantized weight.
    """
    c = config
    on_gpu = c.placement.device is Device.gpu
    gpus = iter(range(10**9))

    def place(count: int) -> str:
        if not on_gpu or count == 0:
            return "cpu"
        taken = [next(gpus) for _ in range(count)]
        return f"gpu {taken[0]}" if count == 1 else f"gpu {taken[0]} to {taken[-1]}"

    def gib(kind: str, elements: float) -> float | None:
        return None if model is None else LIBRARIES_GIB[kind] + elements / GIB

    p = model.parameters if model else 0
    linear = model.linear if model else 0
    quantized = c.quant.scheme != "none"
    served = ITEMSIZE[c.generator.dtype.value]
    forms: list[float] = [p * served]  # published without quantization, and quantized
    if quantized:
        forms.append((p - linear) * served + linear * bits / 8)
    found = [PlannedPart(name="weight store", processes=1, where="cpu", gib=gib("store", STORED_COPIES * max(forms)))]
    sequence = PROMPT_TOKENS + c.sampling.max_new_tokens

    def scorer(rows: int) -> float:
        # a process group of one gathers its weights as well; scoring a row needs the logits of all its tokens
        return 8 * p + _batch(model, rows * sequence, rows * sequence, kept=False)

    if quantized:
        held = scorer(c.calibration.batch_size) + forms[0] + linear  # a version that arrives, and the last codes
        found.append(PlannedPart(name="calibrator", processes=1, where=place(1), gib=gib("calibrator", held)))
    # weights, gradients and two moments in float32; what is published, and what was, to count changes; with
    # checkpoints, a copy of weights and moments that is written beside the next steps
    state = 16 * p + 2 * sum(forms) + (12 * p if c.checkpoint.every else 0)
    t = c.trainer
    batch = _batch(
        model, t.micro_batch * sequence, t.micro_batch * c.sampling.max_new_tokens, kept=not t.activation_checkpointing
    )
    found.append(
        PlannedPart(
            name="trainer",
            processes=t.ranks,
            where=place(t.ranks),
            gib=gib("trainer", state / t.ranks + 4 * p + batch),  # weights are gathered on every rank
        )
    )
    cache = c.generator.kv_cache_gib * GIB if not on_gpu else 0.0
    found += [
        PlannedPart(
            name=f"generator {i}",
            processes=1,
            where=place(c.generator.tensor_parallel),
            gib=gib("generator", SERVED_COPIES * sum(forms) + cache),
        )
        for i in range(c.generator.replicas)
    ]
    if c.algo.kl > 0:
        found.append(
            PlannedPart(name="reference", processes=1, where=place(1), gib=gib("reference", scorer(t.micro_batch)))
        )
    found.append(PlannedPart(name="reward", processes=1 + c.reward.workers, where="cpu", gib=gib("reward", 0)))
    return found


def _batch(model: Sizes | None, tokens: int, scored: int, *, kept: bool) -> float:
    """Bytes of one micro-batch: logits of the scored tokens, and what blocks hold of all tokens in float32.

    Args:
        kept: every block holds it, for a backward pass.
    """
    if model is None:
        return 0.0
    blocks = model.layers if kept else 1
    return 4.0 * (LOGIT_COPIES * scored * model.vocabulary + 16 * blocks * tokens * model.hidden)


def arithmetic(config: GrpoConfig) -> list[tuple[str, str]]:
    """How a step is cut up, each line with the numbers it comes from."""
    c = config
    per_rank = math.ceil(c.episodes_per_step / c.trainer.ranks)
    batches = math.ceil(per_rank / c.trainer.micro_batch)
    slots = (c.async_.max_age + 1) * c.prompts_per_step
    return [
        ("episodes a step", f"{c.prompts_per_step} prompts x {c.group_size} = {c.episodes_per_step}"),
        ("of one rank", f"{c.episodes_per_step} / {c.trainer.ranks} ranks, at most {per_rank}"),
        ("micro-batches of a rank", f"{per_rank} / {c.trainer.micro_batch}, rounded up: {batches}"),
        ("optimizer steps", str(c.steps)),
        ("completions in all", f"{c.steps} x {c.episodes_per_step} = {c.steps * c.episodes_per_step}"),
        ("groups under way", f"(max_age {c.async_.max_age} + 1) x {c.prompts_per_step} = {slots}"),
        ("requests under way", f"{slots} x {c.group_size} = {slots * c.group_size}, of which an engine decodes "
                               f"{c.generator.max_running} at once"),
        ("age of trained groups", f"at most {c.age_bound} steps"),
        ("checkpoints", f"every {c.checkpoint.every} steps, {c.checkpoint.keep} kept" if c.checkpoint.every else "off"),
    ]  # fmt: skip


def total_gib(planned: Iterable[PlannedPart]) -> float | None:
    """Estimated peak of all processes together."""
    found = [None if p.gib is None else p.gib * p.processes for p in planned]
    return None if any(g is None for g in found) else sum(g for g in found if g is not None)
