"""Writes requirements/cpu.txt and requirements/cuda.txt: one exact version of every package of the set.

`python scripts/lock.py cpu` or `cuda`; pip resolves pyproject.toml without installing anything, so either lock can be
written on any Linux x86-64 machine. The installer takes the locks with --no-deps: what is not in them is not installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

NO_DEPS = ["torchstore==0.1.2"]  # its metadata pins torch 2.9 and Monarch 0.1; it runs with ours
DROP = {
    # asked for by vLLM and unused here; beside a CPU torch the index offers CUDA builds of them, which break
    # `import transformers` ("operator torchvision::nms does not exist")
    "cpu": {"torchvision", "torchaudio", "torchcodec"},
    "cuda": set[str](),
}
X86_ONLY = {"intel-openmp", "intel-cmplr-lib-ur"}


def resolve(stack: str) -> dict[str, str]:
    """Name to version of everything that forge-rl[stack,dev] needs, itself left out."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
        command += ["--report", report.name, f"{ROOT}[{stack},dev]"]
        if subprocess.run(command, check=False).returncode != 0:
            subprocess.run([*command, "--extra-index-url", PYTORCH_CPU_INDEX], check=True)
        items = [item["metadata"] for item in json.loads(Path(report.name).read_text())["install"]]
    return {item["name"].lower().replace("_", "-"): item["version"] for item in items if item["name"] != "forge-rl"}


def main(stack: str) -> None:
    versions = resolve(stack)
    lines = [f"{name}=={version}" for name, version in versions.items() if name not in DROP[stack]] + NO_DEPS
    lines = [f'{line}; platform_machine == "x86_64"' if line.split("==")[0] in X86_ONLY else line for line in lines]
    header = f"# Written by scripts/lock.py {stack}; installed with --no-deps by scripts/install.sh.\n"
    (ROOT / "requirements" / f"{stack}.txt").write_text(header + "\n".join(sorted(lines)) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] not in (["cpu"], ["cuda"]):
        sys.exit("usage: python scripts/lock.py cpu|cuda")
    main(sys.argv[1])
