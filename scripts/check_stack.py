"""Imports every package that Forge uses and says which one fails and why; the installer's last stage."""

from __future__ import annotations

import importlib
import logging
import os
import sys

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", MONARCH_FILE_LOG="off", MONARCH_STDERR_LOG="off")
logging.disable(logging.WARNING)

# import name, where it differs from the distribution's: pip's name after the colon
STACK = """
torch torchao torchtitan torchtitan.config monarch.actor:torchmonarch torchstore vllm transformers accelerate gguf
safetensors datasets hydra:hydra-core omegaconf math_verify:math-verify reasoning_gym:reasoning-gym sympy pebble rich
tensorboard matplotlib pyarrow cloudpickle numpy yaml:pyyaml pytest pytest_asyncio pytest_timeout mypy forge:forge-rl
""".split()


def main() -> int:
    failed = 0
    for entry in STACK:
        module, _, distribution = entry.partition(":")
        try:
            importlib.import_module(module)
        except Exception as error:
            failed += 1
            reason = (str(error).splitlines() or [""])[0]
            print(f"{distribution or module}: `import {module}` fails: {type(error).__name__}: {reason}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
