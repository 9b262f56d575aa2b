"""The calibration actor: an unquantized copy of the policy that is observed and compared with its quantized form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge import weights
from forge.actors.trainer import Trainer
from forge.config import GrpoConfig
from forge.mesh import Part, concurrent_endpoint, spawn
from forge.quant import Plan, Quantization
from forge.quant.calibration import Measurement, PolicyMeasurement
from forge.types import ActivationScale, Episode, Manifest

if TYPE_CHECKING:
    from forge.engine_titan_calibrator import TitanCalibrator, Verified


class Calibrator(Trainer):
    """A trainer of one rank that never trains.

    Args:
        config: the run's configuration.
        folder: model folder; its weights are version 0.
        store: name of the weight store.
        rendezvous: file for its process group of one.
    """

    trainer: TitanCalibrator

    def __init__(self, config: GrpoConfig, folder: Path, store: str, rendezvous: str) -> None:
        alone = replace(
            config, trainer=replace(config.trainer, ranks=1, threads=config.trainer.threads or os.cpu_count() or 1)
        )
        super().__init__(alone, folder, store, rendezvous)

    def _build(self, config: GrpoConfig, folder: Path) -> TitanCalibrator:
        from forge.engine_titan_calibrator import TitanCalibrator

        return TitanCalibrator(config, folder)

    @concurrent_endpoint
    async def smooth(self, rows: Sequence[Sequence[int]], target: Path, exponent: float) -> int:
        """Write the smoothed model as a folder; returns the channels that got a factor."""
        return await self._run(partial(self.trainer.smooth, rows, target, exponent=exponent))

    @concurrent_endpoint
    async def pull(self, manifest: Manifest) -> None:
        """Take over a version's unquantized weights."""
        async with weights.reading(self.store, manifest) as tensors:
            await self._run(self.trainer.load, tensors)

    @concurrent_endpoint
    async def measure(
        self,
        rows: Sequence[Sequence[int]],
        more: Sequence[Sequence[int]],
        live: Mapping[str, ActivationScale],
    ) -> Measurement:
        """Observe rows of token ids and propose scales."""
        return await self._run(self.trainer.measure, rows, more, live)

    @concurrent_endpoint
    async def verify(self, episodes: Sequence[Episode], scales: Mapping[str, ActivationScale] | None) -> list[Verified]:
        """How far the greedy policy (quantized with these scales, or unquantized) agrees with drafts."""
        return await self._run(self.trainer.verify, episodes, scales)

    @concurrent_endpoint
    async def compare(
        self,
        episodes: Sequence[Episode],
        proposed: Mapping[str, ActivationScale],
        live: Mapping[str, ActivationScale] | None,
    ) -> PolicyMeasurement:
        """Quantized against unquantized policy on the tokens of given episodes."""
        return await self._run(self.trainer.compare, episodes, proposed, live)

    @concurrent_endpoint
    async def score(
        self, sequences: Sequence[Sequence[int]], scales: Mapping[str, ActivationScale] | None
    ) -> list[list[float]]:
        """Log-prob of every token but the first, by the quantized policy with these scales or the unquantized one."""
        return await self._run(self.trainer.score_as, sequences, scales)

    @concurrent_endpoint
    async def decode(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Text of token ids, without special tokens."""
        return await self._run(self._decode, completions)

    def _decode(self, completions: Sequence[Sequence[int]]) -> list[str]:
        tokenizer: Any = self.trainer.tokenizer()
        return [tokenizer.decode(list(c), skip_special_tokens=True) for c in completions]

    @concurrent_endpoint
    async def plan(self) -> Plan:
        """Which layers are quantized."""
        return self.trainer.plan

    @concurrent_endpoint
    async def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        return await self._run(self.trainer.end_tokens)


async def start_smoothed(
    config: GrpoConfig, folder: Path, rows: Sequence[Sequence[int]], *, scratch: Path, stack: AsyncExitStack
) -> tuple[Part, Path]:
    """A calibrator outside of a run, on the model as its scheme smooths it.

    Args:
        rows: token ids to smooth by; the first `calibration.batch_size` are observed.
        scratch: folder for logs and the smoothed model.
        stack: stops the calibrator.

    Returns:
        the calibrator, set up; the folder of the model it holds: `folder` itself where nothing is smoothed.
    """

    async def start(held: Path, name: str) -> Part:
        part = await spawn("calibrator", Calibrator, config, held, "", str(scratch / name), log_dir=scratch)
        stack.push_async_callback(part.stop)
        await part.call("setup")
        return part

    calibrator = await start(folder, "first")
    quantization = Quantization.of(config.quant)
    if quantization is None or not quantization.smooths or config.quant.smooth == 0:
        return calibrator, folder
    smoothed = scratch / "smoothed"
    await calibrator.call_one("smooth", rows[: config.calibration.batch_size], smoothed, config.quant.smooth)
    await calibrator.stop()
    return await start(smoothed, "second"), smoothed
