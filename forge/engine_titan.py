"""The trainer of one rank: a TorchTitan model under FSDP2, its optimizer, and what leaves it.

Every rank receives the same groups, so the split into packs and the global token count need no communication;
gradients are summed, not averaged, over ranks (each pack's loss is already divided by the global token count).
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from forge.batch import Pack, split, trained_episodes, trained_tokens
from forge.batch import pack as pack_episodes
from forge.config import Decay, GrpoConfig
from forge.errors import PartFailed
from forge.loss import LossSettings, grpo_loss, loss_metrics, token_logprobs
from forge.quant import Plan, Quantization
from forge.quant.layers import FakeQuantLinear, prepare
from forge.quant.pack import codes, linear_shapes, pack
from forge.rounding import dithered
from forge.types import (
    ActivationScale,
    Completion,
    Episode,
    FinishReason,
    Group,
    Prompt,
    StepStats,
    TensorSpec,
)


def init_process(rank: int, world_size: int, rendezvous: str, *, on_cpu: bool, threads: int) -> None:
    """Join the trainer's process group. Call once per process, before anything of titan is imported.

    Args:
        rendezvous: path of a file on a file system that all ranks share; no port is taken.
    """
    if on_cpu:
        torch.set_num_threads(threads)
        import torchtitan.tools.utils as titan_utils

        # titan settles on cuda at import, whatever the machine has
        titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu
        # all ranks are on this host; by the host's name gloo might listen on an address that others can reach
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    else:
        torch.cuda.set_device(0)  # each process sees its own GPU alone
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group(
        "gloo" if on_cpu else "cpu:gloo,cuda:nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )


@dataclass(kw_only=True, slots=True)
class Published:
    """One rank's shards of a version, in the dtype that generators serve, frozen at the end of a step."""

    shards: dict[str, Tensor]
    """By Hugging Face name: DTensors, or plain tensors that this rank alone publishes."""
    unquantized: dict[str, Tensor]
    """Shards of the weights that `shards` holds quantized, where they were asked for."""
    changed: int
    """Elements of this rank whose value differs from the previous version's."""
    total: int
    """Elements of this rank."""
    changed_codes: int = 0
    """Those of `changed` that are codes of quantized weights."""
    total_codes: int = 0


class TitanTrainer:
    """One rank of the trainer.

    Args:
        config: the run's configuration.
        folder: model folder to start from.

    Raises:
        ModelFolderError: the folder's weights do not fit its config.json.
    """

    def __init__(self, config: GrpoConfig, folder: Path) -> None:
        from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed.activation_checkpoint import FullAC
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.llama3.parallelize import parallelize_llama

        from forge.engine_titan_model import hf_module, hf_name, load_weights, read_hf_config, titan_config

        self.config = config
        self.folder = folder
        self.hf_name = hf_name
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.on_cpu = config.placement.device.value == "cpu"
        self.device = torch.device("cpu" if self.on_cpu else "cuda")
        self.version = 0
        self.skipped_in_a_row = 0
        self.settings = LossSettings.of(config.algo)

        set_spmd_backend("partial_dtensor")
        parallelism = ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward=self._reshard_policy)
        model_config = titan_config(read_hf_config(folder), max_len=config.model.max_len, on_cpu=self.on_cpu)
        self.tied = model_config.enable_weight_tying
        self.served = getattr(torch, config.generator.dtype.value)
        with torch.device("meta"):
            self.model = model_config.build()
        self.quantization = Quantization.of(config.quant)
        self.prepared: dict[str, FakeQuantLinear] = {}
        self.plan = Plan(quantized={})
        if self.quantization is not None:  # before FSDP, which takes hold of the modules
            self.plan = self.quantization.plan(linear_shapes(self.specs()))
            self.prepared = prepare(self.model, self.quantization, served=self.served, name_of=hf_module)
        self.qat_until = 0  # first step that no longer trains with fake-quant because calibration asked for it
        self.lr_scale = 1.0
        dims = ParallelDims.from_config(parallelism, self.world_size)
        dims.build_mesh()
        parallelize_llama(
            self.model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param=config.trainer.dtype.value, mixed_precision_reduce="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=FullAC.Config() if config.trainer.activation_checkpointing else None,
            dump_folder="",
        )
        for module in self._fsdp_modules():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        self.model.to_empty(device=self.device)
        with torch.no_grad():
            self.model.init_states(buffer_device=self.device)
        load_weights(self.model, folder, tied=self.tied)
        # Called in place of the head's own forward pass, where FSDP has its weight at hand.
        self._head: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.model.lm_head.forward = lambda hidden: self._head(hidden[0], self.model.lm_head.weight)[None]
        self._build_optimizer()
        self._last: dict[str, Tensor] = {}

    @property
    def _reshard_policy(self) -> str:
        # On a CPU memory is plenty and gathering is slow; on GPUs it is the other way round.
        return "never" if self.on_cpu else "default"

    def _fsdp_modules(self) -> Iterator[Any]:
        from torch.distributed.fsdp import FSDPModule

        return (m for m in self.model.modules() if isinstance(m, FSDPModule))

    def _build_optimizer(self) -> None:
        from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

        t = self.config.trainer
        self.optimizer = OptimizersContainer(
            OptimizersContainer.Config(
                implementation="fused",
                param_groups=[
                    ParamGroupConfig(
                        pattern=".*",
                        optimizer_name="AdamW",
                        optimizer_kwargs={
                            "lr": t.lr,
                            "betas": (t.beta1, t.beta2),
                            "eps": t.eps,
                            "weight_decay": t.weight_decay,
                        },
                    )
                ],
            ),
            model_parts=[self.model],
        )
        schedule = (
            LRSchedulersContainer.Config(warmup_steps=t.warmup_steps, decay_ratio=0.0)
            if t.decay is Decay.none
            else LRSchedulersContainer.Config(warmup_steps=t.warmup_steps, decay_type=t.decay.value)
        )
        self.schedule = schedule.build(optimizers=self.optimizer, training_steps=self.config.steps)

    def forward(self, episodes: Sequence[Episode]) -> tuple[Pack, Tensor, Tensor]:
        """Pack episodes and run the model.

        Returns:
            the pack; log-prob of each trained token, float32 [N]; entropy float32 [N].
        """
        return self._score(episodes, self.config.sampling.temperature)

    def _score(self, episodes: Sequence[Episode], temperature: float) -> tuple[Pack, Tensor, Tensor]:
        def head(p: Pack, hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
            return torch.stack(token_logprobs(hidden_ND, weight_VD, p.target, temperature=temperature), -1)

        p, found = self._run(episodes, head)
        return p, found[:, 0], found[:, 1].detach()

    def logits(self, episodes: Sequence[Episode]) -> tuple[Pack, Tensor]:
        """Pack episodes and run the model: the pack, and the logits [N, V] that predict its N completion tokens."""
        return self._run(episodes, lambda _, hidden_ND, weight_VD: F.linear(hidden_ND, weight_VD))

    def _run(self, episodes: Sequence[Episode], head: Callable[[Pack, Tensor, Tensor], Tensor]) -> tuple[Pack, Tensor]:
        """The pack, and what the head makes of it: of the rows that predict trained tokens and no others."""
        from forge.engine_titan_model import attention_masks

        p = pack_episodes(episodes).to(self.device)
        self._head = lambda hidden_TD, weight_VD: head(p, hidden_TD[p.source], weight_VD)
        found = self.model(
            p.token_ids[None], positions=p.positions[None], attention_masks=attention_masks(p, on_cpu=self.on_cpu)
        )
        return p, found[0]

    def step(self, groups: Sequence[Group]) -> StepStats:
        """One optimizer step on a batch of groups.

        A batch with nothing to train on, and a non-finite loss or gradient, leave weights and optimizer untouched
        and are counted.

        Raises:
            PartFailed: more than `trainer.max_skipped_steps` steps in a row were not finite.
        """
        episodes = trained_episodes(groups, mask_truncated=self.config.algo.mask_truncated)
        tokens = trained_tokens(episodes)
        lr_scale = self._begin_step()
        metrics: dict[str, float] = {
            "trainer/lr": self.schedule.get_metrics()["lr/AdamW"] * lr_scale,
            "trainer/episodes": float(len(episodes)),
            "trainer/masked_tokens": float(sum(e.num_response_tokens for e in episodes) - tokens),
        }
        if self.prepared:
            metrics["quant/qat"] = float(self.qat)
        if tokens == 0:
            metrics |= loss_metrics({}, tokens=0, kl=0.0) | {"trainer/skipped_empty": 1.0}
            return self._advance(metrics)
        sums = self._accumulate(episodes, tokens)
        grad_norm = self._clip()
        metrics |= loss_metrics(sums, tokens=tokens, kl=self.settings.kl)
        if not (math.isfinite(grad_norm) and math.isfinite(metrics["loss/total"])):
            self.skipped_in_a_row += 1
            self.optimizer.zero_grad()
            if self.skipped_in_a_row > self.config.trainer.max_skipped_steps:
                raise PartFailed(
                    "trainer",
                    f"{self.skipped_in_a_row} steps in a row had a loss or gradient that is not finite "
                    f"(loss {metrics['loss/total']}, gradient norm {grad_norm}); trainer.max_skipped_steps="
                    f"{self.config.trainer.max_skipped_steps}: lower trainer.lr",
                )
            return self._advance({"trainer/skipped_nonfinite": 1.0})
        self.skipped_in_a_row = 0
        metrics["trainer/grad_norm"] = grad_norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._advance(metrics)

    # ---- quantization -----------------------------------------------------------------------------------------

    @property
    def qat(self) -> bool:
        """Whether the step after the current version trains with fake-quantized layers."""
        qat = self.config.quant.qat
        return (qat.enabled and self.version >= qat.start_step) or self.version < self.qat_until

    def _begin_step(self) -> float:
        """Switch fake-quant and learning rate for the next step; returns the factor on the scheduled rate."""
        self.fake_quant(self.qat)
        factor = self.lr_scale if self.version < self.qat_until else 1.0
        for optimizer, scheduler in zip(self.optimizer, self.schedule, strict=True):
            for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr * factor
        return factor

    def fake_quant(self, enabled: bool) -> None:
        """Compute on the scheme's grid, or plainly."""
        for layer in self.prepared.values():
            layer.enabled = enabled

    def set_scales(self, scales: Mapping[str, ActivationScale]) -> None:
        """Activation scales of a static scheme, by Hugging Face module name."""
        for name, layer in self.prepared.items():
            layer.static = scales.get(name)

    def switch_to_qat(self, *, steps: int, lr_scale: float) -> None:
        """Train the next `steps` steps with fake-quant at `lr_scale` times the scheduled learning rate."""
        self.qat_until = self.version + steps
        self.lr_scale = lr_scale

    def _advance(self, metrics: dict[str, float]) -> StepStats:
        self.schedule.step()
        self.version += 1
        return StepStats(version=self.version, metrics=metrics)

    def _accumulate(self, episodes: Sequence[Episode], tokens: int) -> dict[str, float]:
        """Forward and backward over this rank's packs; sums of the statistics over all ranks."""
        rounds = split(episodes, ranks=self.world_size, micro_batch=self.config.trainer.micro_batch)[self.rank]
        totals: dict[str, Tensor] = {}
        for i, micro in enumerate(rounds):
            last = i == len(rounds) - 1
            if self.on_cpu:  # gather once and reduce once a step, not once a pack
                self.model.set_requires_gradient_sync(last)
                self.model.set_reshard_after_backward(last)
                self.model.set_is_last_backward(last)
            p, lp, entropy = self.forward(micro)
            loss, sums = grpo_loss(
                lp,
                p.sampler_logprobs,
                p.reference_logprobs,
                p.advantages,
                settings=self.settings,
                denominator=tokens,
                episode_N=p.episode,
            )
            sums["entropy"] = entropy.sum()
            loss.backward()
            for name, value in sums.items():
                combine = torch.maximum if name.startswith("max/") else torch.add
                totals[name] = combine(totals[name], value) if name in totals else value
        return self._reduce(totals)

    def _reduce(self, totals: dict[str, Tensor]) -> dict[str, float]:
        reduced: dict[str, float] = {}
        for op, names in (
            (dist.ReduceOp.SUM, [n for n in totals if not n.startswith("max/")]),
            (dist.ReduceOp.MAX, [n for n in totals if n.startswith("max/")]),
        ):
            values = torch.stack([totals[n].double() for n in names]).to(self.device)
            dist.all_reduce(values, op=op)
            reduced |= dict(zip(names, values.tolist(), strict=True))
        return reduced

    def _clip(self) -> float:
        from torchtitan.distributed.utils import clip_grad_norm_

        norm = clip_grad_norm_(list(self.model.parameters()), self.config.trainer.max_grad_norm, foreach=True)
        return float(norm)

    @torch.no_grad()
    def logprobs(self, episodes: Sequence[Episode]) -> dict[tuple[int, int], tuple[float, ...]]:
        """Log-prob of every sampled token of this rank's share of the episodes, by (group, member)."""
        rounds = split(episodes, ranks=self.world_size, micro_batch=self.config.trainer.micro_batch)[self.rank]
        result: dict[tuple[int, int], tuple[float, ...]] = {}
        for micro in rounds:
            p, lp, _ = self.forward(micro)
            for i, e in enumerate(micro):
                result[e.group, e.member] = tuple(lp[p.episode == i].tolist())
        self.reshard()
        return result

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], *, batch_size: int) -> list[list[float]]:
        """Log-prob of every token of each sequence but the first, at temperature 1; the same on every rank.

        Args:
            sequences: of 2 tokens or more.
            batch_size: how many are packed together.
        """
        found: list[list[float]] = []
        for start in range(0, len(sequences), batch_size):
            batch = [unscored(s, start + i, given=1) for i, s in enumerate(sequences[start : start + batch_size])]
            p, lp, _ = self._score(batch, temperature=1.0)
            found += [lp[p.episode == i].tolist() for i in range(len(batch))]
        self.reshard()
        return found

    def canary(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """`score` of pinned tokens by the policy that is published; empty while a static scheme has no scales yet."""
        layers = self.prepared.values()
        if any(layer.static is None for layer in layers) and self.quantization and self.quantization.scheme.static:
            return []
        trained = [layer.enabled for layer in layers]
        self.fake_quant(True)
        try:
            return self.score(sequences, batch_size=len(sequences))
        finally:
            for layer, enabled in zip(layers, trained, strict=True):
                layer.enabled = enabled

    def reshard(self) -> None:
        """Give up gathered parameters: without a backward pass nothing else does, and they are not what is saved."""
        for module in self._fsdp_modules():
            module.reshard()

    # ---- what leaves the trainer ------------------------------------------------------------------------------

    @torch.no_grad()
    def stage(self, *, unquantized: bool = False) -> Published:
        """Copy this rank's shards as generators serve them, so that the next step may change the weights.

        Args:
            unquantized: copy those of quantized weights in the generators' dtype as well.
        """
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        published = Published(shards={}, unquantized={}, changed=0, total=0)
        for name, parameter in self.published_parameters():
            whole = leaves_a_rank_empty(parameter.shape[0], self.world_size)
            if whole:
                local, offset = parameter.full_tensor(), 0  # a collective: every rank takes part
                if self.rank != 0:
                    continue
            else:
                local = parameter.to_local()
                _, start = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                offset = start[0] * math.prod(parameter.shape[1:])  # FSDP shards the first dimension
            low_bit = self._pack(self.hf_name(name), local)
            if low_bit is None or unquantized:
                plain = dithered(local, offset=offset, dtype=self.served)
                target = published.shards if low_bit is None else published.unquantized
                target[self.hf_name(name)] = plain if whole else _sharded_like(plain, parameter)
            values = plain if low_bit is None else codes(low_bit)
            before = self._last.get(name)
            changed = values.numel() if before is None else int((values != before).sum())
            self._last[name] = values
            published.changed += changed
            published.total += values.numel()
            if low_bit is not None:
                published.changed_codes += changed
                published.total_codes += values.numel()
                for part, tensor in low_bit.items():
                    published.shards[part] = tensor if whole else _sharded_like(tensor, parameter)
        return published

    def _pack(self, name: str, weight: Tensor) -> dict[str, Tensor] | None:
        """Low-bit tensors of a quantized layer's rows; None for what is not quantized."""
        module = name.removesuffix(".weight")
        if self.quantization is None or module not in self.prepared or module == name:
            return None
        computed = getattr(torch, self.config.trainer.dtype.value)  # what the forward pass quantizes
        return pack(module, weight.to(computed), self.quantization, served=self.served)

    def published_parameters(self) -> Iterator[tuple[str, Any]]:
        """Each parameter once; a tied weight under the embedding's name."""
        for name, parameter in self.model.named_parameters(remove_duplicate=True):
            tied_head = self.tied and name in ("tok_embeddings.weight", "lm_head.weight")
            yield ("tok_embeddings.weight" if tied_head else name), parameter

    def specs(self) -> dict[str, TensorSpec]:
        """Name, shape and dtype of everything a version holds."""
        return {
            self.hf_name(name): TensorSpec(shape=tuple(p.shape), dtype=self.config.generator.dtype.value)
            for name, p in self.published_parameters()
        }


def unscored(token_ids: Sequence[int], index: int, given: int = -1) -> Episode:
    """A row as an episode of its own group: its first `given` tokens as the prompt (by default all but the last)."""
    completion = tuple(token_ids[given:])
    return Episode(
        prompt=Prompt(id="", question="", answer="", token_ids=tuple(token_ids[:given])),
        completion=Completion(
            token_ids=completion,
            logprobs=(0.0,) * len(completion),
            versions=(0,) * len(completion),
            text="",
            finish_reason=FinishReason.LENGTH,
        ),
        group=index,
        member=0,
    )


def _sharded_like(local: Tensor, parameter: Any) -> Any:
    """This rank's rows as a DTensor that is sharded as a parameter is; the other dimensions are the local ones."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def leaves_a_rank_empty(rows: int, ranks: int) -> bool:
    """Whether FSDP's split of `rows` into equal chunks leaves some rank without any.

    TorchStore cannot read a tensor of which a writer holds nothing; rank 0 then publishes it whole.
    Example: 5 rows over 4 ranks are 2, 2, 1, 0.
    """
    return math.ceil(rows / ranks) * (ranks - 1) >= rows
