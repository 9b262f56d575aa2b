"""Parts of a run as the loop sees them: one small class for each role, over calls to actors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge import weights
from forge.errors import PartFailed
from forge.mesh import Part
from forge.quant import Format, Quantization
from forge.quant.calibration import Measurement, PolicyMeasurement
from forge.quant.pack import num_bytes, quantized_specs
from forge.recalibration import Verified
from forge.service import OnePart, Worker
from forge.types import (
    ActivationScale,
    Canary,
    Completion,
    Episode,
    Group,
    Manifest,
    SamplingRequest,
    Staged,
    StepStats,
    TensorSpec,
)


@dataclass(slots=True)
class Replica:
    """One generator as the pool sees it."""

    part: Part

    @property
    def name(self) -> str:
        return self.part.name

    def kill(self) -> None:
        self.part.kill()

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        return await self.part.call_one("generate", requests)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self.part.call_one("score", [list(s) for s in sequences])

    async def pull(self, manifest: Manifest) -> dict[str, float]:
        return await self.part.call_one("pull", manifest)

    async def statistics(self) -> dict[str, float]:
        return await self.part.call_one("statistics")


class Learner:
    """The trainer's ranks and the weight store.

    Args:
        specs: what an unquantized version holds.
        quantization: of what generators serve.
        served: dtype of what is not quantized.
        pinned: token ids that every version is scored on, for generators to compare; none: it is not.
    """

    def __init__(
        self,
        part: Part,
        store: weights.WeightStore,
        specs: dict[str, TensorSpec],
        quantization: Quantization | None,
        served: str,
        pinned: Sequence[Sequence[int]],
    ) -> None:
        self.part, self.store, self.plain_specs, self.quantization = part, store, specs, quantization
        self.specs = specs if quantization is None else quantized_specs(specs, quantization, served=served)
        self.pinned = tuple(map(tuple, pinned))
        self.staged: list[Staged] = []
        self.due: Callable[[int], bool] = lambda version: False
        """Whether a version is calibrated before it goes live, and so staged unquantized as well."""

    async def step(self, groups: Sequence[Group]) -> StepStats:
        return (await self.part.call("step", list(groups)))[0]

    async def stage(self, version: int) -> Manifest:
        return await self.stage_forms(version, unquantized=self.due(version))

    async def stage_forms(self, version: int, *, unquantized: bool) -> Manifest:
        """Freeze a version as generators serve it and, if asked, unquantized as well."""
        self.staged = await self.part.call("stage", unquantized, self.pinned)
        scored = self.staged[0].canary
        scheme = "" if self.quantization is None else self.quantization.label
        return Manifest(
            version=version,
            tensors=self.specs,
            num_bytes=num_bytes(self.specs),
            changed_share=sum(s.changed for s in self.staged) / max(sum(s.total for s in self.staged), 1),
            scheme=scheme,
            digests=weights.add_digests(s.digests[scheme] for s in self.staged),
            canary=Canary(token_ids=self.pinned, logprobs=scored) if scored else None,
        )

    def plain(self, version: int) -> Manifest:
        """Manifest of the unquantized form that was staged with a version."""
        return Manifest(
            version=version,
            tensors=self.plain_specs,
            num_bytes=num_bytes(self.plain_specs),
            changed_share=math.nan,
            digests=weights.add_digests(s.digests[""] for s in self.staged),
        )

    def metrics(self) -> dict[str, float]:
        """Bytes and changes of what was staged last."""
        if self.quantization is None:
            return {}
        low_bit = {n: s for n, s in self.specs.items() if self.plain_specs.get(n) != s}
        modules = {n.rpartition(".")[0] for n in low_bit}
        plain = {n: s for n, s in self.plain_specs.items() if n.removesuffix(".weight") in modules}
        return {
            "quant/changed_codes_share": sum(s.changed_codes for s in self.staged)
            / max(sum(s.total_codes for s in self.staged), 1),
            "quant/published_bytes": float(num_bytes(self.specs)),
            "quant/bf16_bytes": float(num_bytes(self.plain_specs)),
            "quant/layers_bytes_share": num_bytes(low_bit) / max(num_bytes(plain), 1),
        }

    async def publish(self, manifest: Manifest) -> None:
        segment = self.store.segment_for(manifest)
        await self.part.call("publish", manifest, segment)
        await self.store.commit(manifest, segment)

    async def free_before(self, version: int) -> None:
        await self.store.free_before(version)

    async def free(self, manifest: Manifest) -> None:
        await self.store.free(manifest)

    async def set_scales(self, scales: Mapping[str, ActivationScale]) -> None:
        await self.part.call("set_scales", scales)

    async def switch_to_qat(self, steps: int, lr_scale: float) -> None:
        await self.part.call("switch_to_qat", steps, lr_scale)

    async def save_quantized(
        self, target: Path, format: Format, scales: Mapping[str, ActivationScale]
    ) -> list[dict[str, Any]]:
        return (await self.part.call("save_quantized", target, format, scales))[0]


@dataclass(slots=True)
class ListToList:
    """An actor of one process with one list-to-list endpoint: a scorer or a reference."""

    part: Worker

    async def score(self, episodes: Sequence[Episode]) -> list[Episode]:
        return await self.part.call_one("score", list(episodes))

    async def annotate(self, episodes: Sequence[Episode]) -> list[Episode]:
        return await self.part.call_one("annotate", list(episodes))


@dataclass(slots=True)
class RemoteCalibrator:
    """The calibration actor. Its calls are not repeated when it dies: what it held is gone, and must be pulled anew."""

    worker: Worker

    @property
    def part(self) -> OnePart:
        return self.worker.part

    @property
    def name(self) -> str:
        return self.part.name

    async def restart(self, error: PartFailed) -> None:
        await self.worker.replace(self.part, error)

    async def pull(self, manifest: Manifest) -> None:
        await self.part.call_one("pull", manifest)

    async def measure(
        self, rows: Sequence[Sequence[int]], more: Sequence[Sequence[int]], live: Mapping[str, ActivationScale]
    ) -> Measurement:
        return await self.part.call_one("measure", list(rows), list(more), dict(live))

    async def verify(
        self, episodes: Sequence[Episode], scales: Mapping[str, ActivationScale] | None
    ) -> Sequence[Verified]:
        return await self.part.call_one("verify", list(episodes), scales)

    async def compare(
        self,
        episodes: Sequence[Episode],
        proposed: Mapping[str, ActivationScale],
        live: Mapping[str, ActivationScale] | None,
    ) -> PolicyMeasurement:
        return await self.part.call_one("compare", list(episodes), proposed, live)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self.part.call_one("score", [list(s) for s in sequences], None)

    async def decode(self, completions: Sequence[Sequence[int]]) -> list[str]:
        return await self.part.call_one("decode", list(completions))
