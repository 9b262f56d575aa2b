"""`forge grpo key=value …`: train by GRPO, from data to a saved model."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from forge.actors.launch import launch
from forge.config import GrpoConfig
from forge.parity import read_parity
from forge.progress import Progress


async def run(config: GrpoConfig, started: float) -> None:
    """Evaluate, train, evaluate again, save; everything a person sees on the way."""
    title = f"GRPO {config.model.name}"
    with Progress(total_steps=config.steps, title=title) as progress:
        async with launch(config, on_stage=progress.stage, started=started) as job:
            progress.note(f"run folder {job.folder.path}")
            progress.note(
                f"age of trained groups is at most {config.age_bound} steps (async.max_age={config.async_.max_age})"
            )
            progress.stage("evaluating before training")
            before = await job.evaluate()
            if before is not None:
                progress.note(f"held-out mean reward before training: {before.mean_reward:.3f}")
            async for step in job.train():
                progress.step(step.step, step.metrics)
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
                found = read_parity(target)
                progress.note(
                    f"quantized model in {target}: log-probs differ by {found['exported_vs_served']['mean']:.5f} from "
                    f"the generators', {found['exported_vs_unquantized']['mean']:.4f} from the unquantized model's"
                )
        progress.summary(json.loads(job.folder.summary.read_text()))
        progress.note(f"report: {job.folder.report}")


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns its exit status."""
    from forge.apps.common import configured, supervised

    started = time.monotonic()
    config = configured("grpo", argv)
    return supervised(run(config, started)) if isinstance(config, GrpoConfig) else config


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
