"""The trainer of one rank: a TorchTitan model under FSDP2, its optimizer, and what leaves it.

Every rank receives the same groups, so the split into packs and the global token count need no communication;
gradients are summed, not averaged, over ranks (each pack's loss is already divided by the global token count).
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.batch import pack, split, trained_episodes, trained_tokens
from forge.config import Decay, GrpoConfig
from forge.errors import PartFailed
from forge.loss import LossSettings, grpo_loss, loss_metrics, token_logprobs
from forge.rounding import dithered
from forge.types import Episode, Group, StepStats, TensorSpec

SHARD_BYTES = 4 * 2**30
"""Largest safetensors file of an exported folder."""


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
    changed: int
    """Elements of this rank whose value differs from the previous version's."""
    total: int
    """Elements of this rank."""


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

        from forge.engine_titan_model import load_weights, read_hf_config, titan_config

        self.config = config
        self.folder = folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.on_cpu = config.placement.device.value == "cpu"
        self.device = torch.device("cpu" if self.on_cpu else "cuda")
        self.version = 0
        self.skipped_in_a_row = 0
        self.settings = LossSettings(clip_low=config.algo.clip_low, clip_high=config.algo.clip_high, kl=config.algo.kl)

        set_spmd_backend("partial_dtensor")
        parallelism = ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward=self._reshard_policy)
        model_config = titan_config(read_hf_config(folder), max_len=config.model.max_len, on_cpu=self.on_cpu)
        self.tied = model_config.enable_weight_tying
        with torch.device("meta"):
            self.model = model_config.build()
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
        self._rows: Tensor | None = None
        # Only trained tokens need logits: the head sees the rows that predict them and no others.
        self.model.lm_head.register_forward_pre_hook(lambda _, args: (args[0][:, self._rows],))
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

    def forward(self, episodes: Sequence[Episode]) -> tuple[Any, Tensor, Tensor]:
        """Pack episodes and run the model.

        Returns:
            the pack; log-prob of each trained token, float32 [N]; entropy float32 [N].
        """
        from forge.engine_titan_model import attention_masks

        p = pack(episodes).to(self.device)
        self._rows = p.source
        logits = self.model(
            p.token_ids[None], positions=p.positions[None], attention_masks=attention_masks(p, on_cpu=self.on_cpu)
        )
        lp, entropy = token_logprobs(logits[0], p.target, temperature=self.config.sampling.temperature)
        return p, lp, entropy

    def step(self, groups: Sequence[Group]) -> StepStats:
        """One optimizer step on a batch of groups.

        A batch with nothing to train on, and a non-finite loss or gradient, leave weights and optimizer untouched
        and are counted.

        Raises:
            PartFailed: more than `trainer.max_skipped_steps` steps in a row were not finite.
        """
        episodes = trained_episodes(groups, mask_truncated=self.config.algo.mask_truncated)
        tokens = trained_tokens(episodes)
        metrics: dict[str, float] = {
            "trainer/lr": self.schedule.get_metrics()["lr/AdamW"],
            "trainer/episodes": float(len(episodes)),
            "trainer/masked_tokens": float(sum(e.num_response_tokens for e in episodes) - tokens),
        }
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
        for module in self._fsdp_modules():
            module.reshard()  # without a backward pass nothing else does, and gathered parameters are not what is saved
        return result

    # ---- what leaves the trainer ------------------------------------------------------------------------------

    @torch.no_grad()
    def stage(self) -> Published:
        """Copy this rank's shards in the generators' dtype, so that the next step may change the weights."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        from forge.engine_titan_model import hf_name

        dtype = getattr(torch, self.config.generator.dtype.value)
        shards: dict[str, Tensor] = {}
        changed = total = 0
        for name, parameter in self._published_parameters():
            whole = leaves_a_rank_empty(parameter.shape[0], self.world_size)
            if whole:
                full = parameter.full_tensor()  # a collective: every rank takes part
                if self.rank != 0:
                    continue
                local = dithered(full, dtype=dtype)
            else:
                _, start = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                offset = start[0] * math.prod(parameter.shape[1:])  # FSDP shards the first dimension
                local = dithered(parameter.to_local(), offset=offset, dtype=dtype)
            before = self._last.get(name)
            changed += local.numel() if before is None else int((local != before).sum())
            total += local.numel()
            self._last[name] = local
            shards[hf_name(name)] = (
                local
                if whole
                else DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            )
        return Published(shards=shards, changed=changed, total=total)

    def _published_parameters(self) -> Iterator[tuple[str, Any]]:
        """Each parameter once; a tied weight under the embedding's name."""
        for name, parameter in self.model.named_parameters(remove_duplicate=True):
            tied_head = self.tied and name in ("tok_embeddings.weight", "lm_head.weight")
            yield ("tok_embeddings.weight" if tied_head else name), parameter

    def specs(self) -> dict[str, TensorSpec]:
        """Name, shape and dtype of everything a version holds."""
        from forge.engine_titan_model import hf_name

        return {
            hf_name(name): TensorSpec(shape=tuple(p.shape), dtype=self.config.generator.dtype.value)
            for name, p in self._published_parameters()
        }

    @torch.no_grad()
    def save_hf(self, target: Path) -> None:
        """Write the weights as a Hugging Face folder, with every other file of the source folder beside them.

        All ranks call it; rank 0 writes. The folder appears complete or not at all.
        """
        from safetensors.torch import save_file

        from forge.engine_titan_model import hf_name
        from forge.model_folder import INDEX

        dtype = getattr(torch, self.config.generator.dtype.value)
        partial = target.with_name(target.name + ".partial")
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for file in sorted(self.folder.iterdir()):
                if (
                    file.is_file()
                    and not file.name.startswith(("model", "forge_"))
                    and file.suffix not in (".bin", ".gguf", ".safetensors")
                ):
                    shutil.copyfile(file, partial / file.name)
        shards: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, parameter in self._published_parameters():
            full = parameter.full_tensor()  # a collective: every rank takes part
            if self.rank == 0:
                full = dithered(full, dtype=dtype)  # bit for bit what generators of this version serve
                if size + full.nbytes > SHARD_BYTES and shards[-1]:
                    shards.append({})
                    size = 0
                shards[-1][hf_name(name)] = full
                size += full.nbytes
        if self.rank == 0:
            weight_map: dict[str, str] = {}
            for i, shard in enumerate(shards, start=1):
                name = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
                save_file(shard, partial / name, metadata={"format": "pt"})
                weight_map |= dict.fromkeys(shard, name)
            if len(shards) > 1:
                total = sum(t.nbytes for s in shards for t in s.values())
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                (partial / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True))
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
        dist.barrier()

    @torch.no_grad()
    def save_state(self, folder: Path) -> None:
        """Write this rank's master weights, moments and step as one safetensors file and fsync it."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _rank_file(self.rank, self.world_size)
        metadata = {"version": str(self.version), "schedule": json.dumps(self.schedule.state_dict())}
        save_file({k: v.contiguous() for k, v in self._state().items()}, path, metadata=metadata)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    @torch.no_grad()
    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, also on another number of ranks.

        Raises:
            PartFailed: a file of the checkpoint is missing or holds other tensors than this model.
        """
        from safetensors import safe_open
        from torch.distributed.tensor import distribute_tensor

        files = sorted(folder.glob("trainer-*-of-*.safetensors"))
        if not files or len(files) != int(files[0].stem.split("-")[-1]):
            raise PartFailed("trainer", f"checkpoint {folder} is incomplete: found {[f.name for f in files]}")
        opened = [safe_open(f, framework="pt") for f in files]
        metadata = opened[0].metadata()
        self.optimizer.state_dict()  # materializes moments, which are created at the first step otherwise
        parameters = dict(self._published_parameters())
        state = self._state()
        if set(state) != set(opened[0].keys()):
            raise PartFailed("trainer", f"checkpoint {folder} holds other tensors than the model: "
                             f"{sorted(set(state) ^ set(opened[0].keys()))[:5]}")  # fmt: skip
        for key, local in state.items():
            kind, _, name = key.partition(":")
            if kind == "step":
                local.copy_(opened[0].get_tensor(key))
                continue
            if len(files) == self.world_size:
                local.copy_(opened[self.rank].get_tensor(key))
                continue
            full = torch.cat([f.get_tensor(key) for f in opened])  # FSDP shards the first dimension
            parameter = parameters[name]
            local.copy_(distribute_tensor(full.to(self.device), parameter.device_mesh, parameter.placements).to_local())
        self.version = int(metadata["version"])
        self.schedule.load_state_dict(json.loads(metadata["schedule"]))
        for optimizer, scheduler in zip(self.optimizer, self.schedule, strict=True):
            for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr

    def _state(self) -> dict[str, Tensor]:
        """Local tensors of weights, both moments and the step count, by "kind:name"."""
        self.optimizer.state_dict()
        (adamw,) = self.optimizer
        state: dict[str, Tensor] = {}
        for name, parameter in self._published_parameters():
            state[f"weight:{name}"] = parameter.to_local()
            moments = adamw.state[parameter]
            state[f"exp_avg:{name}"] = moments["exp_avg"].to_local()
            state[f"exp_avg_sq:{name}"] = moments["exp_avg_sq"].to_local()
            step = moments["step"]
            state[f"step:{name}"] = step.to_local() if hasattr(step, "to_local") else step
        return state


def leaves_a_rank_empty(rows: int, ranks: int) -> bool:
    """Whether FSDP's split of `rows` into equal chunks leaves some rank without any.

    TorchStore cannot read a tensor of which a writer holds nothing; rank 0 then publishes it whole.
    Example: 5 rows over 4 ranks are 2, 2, 1, 0.
    """
    return math.ceil(rows / ranks) * (ranks - 1) >= rows


def _rank_file(rank: int, world_size: int) -> str:
    return f"trainer-{rank:05d}-of-{world_size:05d}.safetensors"
