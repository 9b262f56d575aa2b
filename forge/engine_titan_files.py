"""What a trainer writes to disk and reads back: model folders, and its part of a checkpoint.

All ranks call these functions together; weights are gathered tensor by tensor, and rank 0 writes model folders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from forge.checkpoint import trainer_file, trainer_files
from forge.engine_titan import TitanTrainer
from forge.errors import ModelFolderError, PartFailed
from forge.hf_folder import write_folder
from forge.quant.export import check_exportable, folder_contents
from forge.quant.scheme import Format
from forge.rounding import dithered
from forge.types import ActivationScale


def save_hf(trainer: TitanTrainer, target: Path) -> None:
    """Write the weights as a Hugging Face folder, bit for bit what unquantized generators of this version serve."""
    tensors = _whole(trainer)
    if trainer.rank == 0:
        served = ((name, dithered(t, dtype=trainer.served)) for name, t in tensors)
        write_folder(served, source=trainer.folder, target=target)
    _drain(trainer, tensors)


def save_quantized(
    trainer: TitanTrainer, target: Path, format: Format, scales: Mapping[str, ActivationScale]
) -> list[dict[str, Any]]:
    """Write the quantized weights as a Hugging Face folder: the codes that generators of this version serve.

    Args:
        scales: activation scales of a static scheme, by module name.

    Returns:
        what quantizing cost each layer (rank 0; empty elsewhere), for `write_layer_report`.

    Raises:
        ConfigError: the scheme has no such format.
        ModelFolderError: a weight is not finite, or a layer has no activation scale; they are named.
    """
    assert trainer.quantization is not None
    # every rank must come to the same refusal: one that raises alone leaves the others waiting in a collective
    check_exportable(trainer.quantization, trainer.plan, format, scales)
    _check_finite(trainer)
    tensors = _whole(trainer)
    rows: list[dict[str, Any]] = []
    if trainer.rank == 0:
        computed = getattr(torch, trainer.config.trainer.dtype.value)
        contents = folder_contents(
            ((n, t.to(computed)) for n, t in tensors),
            trainer.quantization,
            trainer.plan,
            format,
            scales=scales,
            served=trainer.served,
        )
        write_folder(
            contents.tensors,
            source=trainer.folder,
            target=target,
            config=contents.config,
            metadata=contents.metadata,
        )
        rows = contents.layers + [
            {"layer": n, "shape": list(s), "scheme": None, "weight_mean_abs_error": 0.0, "weight_relative_error": 0.0,
             "output_relative_error": None, "range_over_std": None, "saturated_share": None}
            for n, s in trainer.plan.left.items()
        ]  # fmt: skip
    _drain(trainer, tensors)
    return rows


def save_tensors(tensors: Iterable[tuple[str, Tensor]], *, source: Path, target: Path) -> None:
    """Write given tensors as a model folder."""
    write_folder(tensors, source=source, target=target)


@torch.no_grad()
def _check_finite(trainer: TitanTrainer) -> None:
    trainer.reshard()
    named = list(trainer.published_parameters())
    bad = torch.tensor([0 if torch.isfinite(p.to_local()).all() else 1 for _, p in named], device=trainer.device)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    names = [trainer.hf_name(name) for (name, _), b in zip(named, bad.tolist(), strict=True) if b]
    if names:
        raise ModelFolderError(
            f"{', '.join(names[:5])} ({len(names)} tensors) hold values that are not finite: nothing is exported"
        )


@torch.no_grad()
def _whole(trainer: TitanTrainer) -> Iterator[tuple[str, Tensor]]:
    """Every weight whole, by Hugging Face name. Each is gathered by all ranks, so all must draw all of them."""
    trainer.reshard()
    for name, parameter in trainer.published_parameters():
        yield trainer.hf_name(name), parameter.full_tensor()


def _drain(trainer: TitanTrainer, tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:  # take part in the gathering of what this rank does not write
        pass
    dist.barrier()


@dataclass(kw_only=True, slots=True, frozen=True)
class Snapshot:
    """One rank's part of a checkpoint, in memory: training may go on while it is written."""

    file: str
    """Name of its file."""
    tensors: dict[str, Tensor]
    """Copies on the CPU of master weights, moments and step, by "kind:name"."""
    metadata: dict[str, str]


@torch.no_grad()
def snapshot(trainer: TitanTrainer) -> Snapshot:
    """Copy this rank's part of a checkpoint."""
    return Snapshot(
        file=trainer_file(trainer.rank, trainer.world_size),
        tensors={k: v.detach().to("cpu", copy=True).contiguous() for k, v in _state(trainer).items()},
        metadata={
            "version": str(trainer.version),
            "schedule": json.dumps(trainer.schedule.state_dict()),
            "qat": json.dumps([trainer.qat_until, trainer.lr_scale]),
        },
    )


def write_snapshot(taken: Snapshot, folder: Path) -> None:
    """Write it as one safetensors file and fsync it.

    Raises:
        PartFailed: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / taken.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(taken.tensors, path, metadata=taken.metadata)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except (OSError, SafetensorError) as error:
        raise PartFailed("checkpoint", f"{path} cannot be written: {error}") from None


@torch.no_grad()
def load_state(trainer: TitanTrainer, folder: Path) -> None:
    """Restore what `write_snapshot` wrote, also on another number of ranks.

    Raises:
        PartFailed: a file of the checkpoint is missing or holds other tensors than this model.
    """
    from safetensors import safe_open
    from torch.distributed.tensor import distribute_tensor

    try:
        files = trainer_files(folder)
    except FileNotFoundError as error:
        raise PartFailed("trainer", str(error)) from None
    opened = [safe_open(f, framework="pt") for f in files]
    metadata = opened[0].metadata()
    trainer.optimizer.state_dict()  # materializes moments, which are created at the first step otherwise
    parameters = dict(trainer.published_parameters())
    state = _state(trainer)
    if set(state) != set(opened[0].keys()):
        raise PartFailed("trainer", f"checkpoint {folder} holds other tensors than the model: "
                         f"{sorted(set(state) ^ set(opened[0].keys()))[:5]}")  # fmt: skip
    for key, local in state.items():
        kind, _, name = key.partition(":")
        if kind == "step":
            local.copy_(opened[0].get_tensor(key))
            continue
        if len(files) == trainer.world_size:
            local.copy_(opened[trainer.rank].get_tensor(key))
            continue
        full = torch.cat([f.get_tensor(key) for f in opened])  # FSDP shards the first dimension
        parameter = parameters[name]
        local.copy_(distribute_tensor(full.to(trainer.device), parameter.device_mesh, parameter.placements).to_local())
    trainer.version = int(metadata["version"])
    trainer.qat_until, trainer.lr_scale = json.loads(metadata.get("qat", "[0, 1.0]"))
    trainer.schedule.load_state_dict(json.loads(metadata["schedule"]))
    for optimizer, scheduler in zip(trainer.optimizer, trainer.schedule, strict=True):
        for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr


def _state(trainer: TitanTrainer) -> dict[str, Tensor]:
    """Local tensors of weights, both moments and the step count, by "kind:name"."""
    trainer.optimizer.state_dict()
    (adamw,) = trainer.optimizer
    state: dict[str, Tensor] = {}
    for name, parameter in trainer.published_parameters():
        state[f"weight:{name}"] = parameter.to_local()
        moments = adamw.state[parameter]
        state[f"exp_avg:{name}"] = moments["exp_avg"].to_local()
        state[f"exp_avg_sq:{name}"] = moments["exp_avg_sq"].to_local()
        step = moments["step"]
        state[f"step:{name}"] = step.to_local() if hasattr(step, "to_local") else step
    return state
