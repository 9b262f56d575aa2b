"""Imports every package that Forge uses and says which one fails and why; the installer's last stage."""

from __future__ import annotations

import importlib
import logging
import os
import sys

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", MONARCH_FILE_LOG="off", MONARCH_STDERR_LOG="off")
logging.disable(logging.WARNING)

# The modules that Forge enters, since a package may import and its parts not; after a colon the distribution's name,
# where it differs from the module's first.
STACK = """
torch torchao.quantization torchtitan.models.llama3.parallelize torchtitan.components.optimizer
monarch.actor:torchmonarch torchstore.api vllm.v1.engine.llm_engine transformers.models.llama.modeling_llama
gguf safetensors.torch datasets hydra:hydra-core omegaconf math_verify:math-verify reasoning_gym:reasoning-gym sympy
rich tensorboard matplotlib.pyplot pyarrow.parquet cloudpickle numpy yaml:pyyaml pytest pytest_asyncio
pytest_timeout mypy forge.config:forge-rl
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
            print(
                f"{distribution or module.split('.')[0]}: `import {module}` fails: {type(error).__name__}: {reason}",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
