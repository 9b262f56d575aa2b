"""`forge grpo key=value …`: train by GRPO, from data to a saved model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

from forge.checkpoint import Checkpoints
from forge.config import GrpoConfig
from forge.errors import PartDied

if TYPE_CHECKING:
    from forge.actors.launch import Run
    from forge.progress import Progress
    from forge.runfolder import RunFolder

RESTORED = ("trainer", "weight store")
"""Parts that hold the newest weights: when one dies, the run goes back to its last checkpoint."""


async def run(config: GrpoConfig, started: float) -> None:
    """Train to the end, from the last checkpoint again when a part that holds weights dies."""
    from forge.actors.launch import launch  # imports torch: seconds that a refused configuration does not cost
    from forge.progress import Progress

    restarts = 0
    with Progress(total_steps=config.steps, title=f"GRPO {config.model.name}", began=started) as progress:
        while True:
            folder: RunFolder | None = None
            try:
                async with launch(config, on_stage=progress.stage, started=started) as job:
                    folder = job.folder
                    await pipeline(job, progress)
                break
            except PartDied as error:
                if error.part not in RESTORED or restarts == config.max_restarts or not _restorable(folder):
                    raise
                restarts += 1
                config = replace(config, name=folder.path.name, resume="auto")
                again = f"{restarts} of max_restarts={config.max_restarts}"
                progress.note(f"{error}; going back to the last checkpoint ({again})")
        progress.summary(json.loads(job.folder.summary.read_text()))
        progress.note(f"report: {job.folder.report}")


def _restorable(folder: RunFolder | None) -> TypeGuard[RunFolder]:
    return folder is not None and Checkpoints(folder.checkpoints, keep=1).latest() is not None


async def pipeline(job: Run, progress: Progress) -> None:
    """Evaluate, train, evaluate again, save; everything a person sees on the way."""
    config = job.config
    progress.note(f"run folder {job.folder.path}")
    progress.note(f"age of trained groups is at most {config.age_bound} steps (async.max_age={config.async_.max_age})")
    progress.stage("evaluating before training")
    before = await job.evaluate()
    if before is not None:
        progress.note(f"held-out mean reward before training: {before.mean_reward:.3f}")
    empty = 0
    async for step in job.train():
        progress.step(step.step, step.metrics)
        empty += "trainer/skipped_empty" in step.metrics
    if empty:
        progress.note(
            f"{empty} steps trained nothing: within each of their groups all rewards were equal, or too few were valid "
            "(group/dropped_* in metrics.jsonl): easier prompts, larger groups or a finer reward give a gradient"
        )
    progress.stage("evaluating after training")
    after = await job.evaluate()
    if after is not None:
        progress.note(f"held-out mean reward after training: {after.mean_reward:.3f}")
    if config.checkpoint.export and config.quant.scheme == "none":
        progress.stage("saving the model")
        progress.note(f"model saved in {await job.save_hf()}")
    elif config.checkpoint.export:
        progress.stage(f"exporting {config.quant.scheme} and checking it in a fresh vLLM")
        target = await job.export()
        from forge.parity import read_parity

        found = read_parity(target)
        progress.note(
            f"quantized model in {target}: log-probs differ by {found['exported_vs_served']['mean']:.5f} from "
            f"the generators', {found['exported_vs_unquantized']['mean']:.4f} from the unquantized model's"
        )


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns its exit status."""
    from forge.apps.common import configured, supervised

    started = time.monotonic()
    config = configured("grpo", argv)
    return supervised(run(config, started)) if isinstance(config, GrpoConfig) else config


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
