"""`forge bench NAME [key=value …]`: measure Forge against a peer or a limit, in one run; runs/bench/NAME.json."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from forge.bench import table, write_claims
from forge.config import load_config
from forge.errors import RefusedInput

BENCHMARKS = {
    "rollout": "generator speed against plain vLLM",
    "quant": "int8 and int4 rollouts against bf16 ones",
    "gap": "log-probs of quantized engine and trainer",
    "loop": "overlap of generation and training, with timed fakes",
    "controller": "episodes a second with replicas that do nothing",
    "train": "a training step against Hugging Face's forward and backward passes",
    "weights": "moving a version against TorchStore's default path and a memcpy",
}


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns its exit status."""
    from forge.apps.common import refuse

    if not argv or argv[0] not in BENCHMARKS:
        sys.stderr.write("usage: forge bench NAME [key=value …]; NAME is one of:\n")
        sys.stderr.writelines(f"  {name.ljust(10)}{what}\n" for name, what in BENCHMARKS.items())
        return 2
    name, overrides = argv[0], argv[1:]
    try:
        config = load_config("grpo", overrides)
        claims = asyncio.run(importlib.import_module(f"forge.benchmarks.{name}").run(config))
    except RefusedInput as error:
        return refuse(error)
    path = Path(config.out) / "bench" / f"{name}.json"
    write_claims(claims, path)
    sys.stdout.write(f"{table(claims)}\nwritten to {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
