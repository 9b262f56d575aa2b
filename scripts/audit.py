"""Asks PyPI's advisory database about every package of the locks, through pip-audit in an environment of its own.

Fails on a known vulnerability. An index without advisories (a mirror) cannot answer: such packages are counted, and it
is said that nothing is known of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
AUDITOR = ROOT / "build" / "audit"
PIP_AUDIT = "pip-audit==2.10.1"


def auditor() -> Path:
    """The pip-audit command, installed if it is missing: it is no dependency of Forge, so it is not in the lock."""
    command = AUDITOR / "bin" / "pip-audit"
    if not command.exists():
        venv.create(AUDITOR, with_pip=True, clear=True)
        subprocess.run([AUDITOR / "bin" / "pip", "install", "-qq", PIP_AUDIT], check=True, stderr=subprocess.DEVNULL)
    return command


def audit(name: str, packages: list[str]) -> list[str]:
    """Known vulnerabilities of pinned packages, one line each; prints how many could be looked up."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(packages))
        file.flush()
        asked = [auditor(), "--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json", "-r", file.name]
        done = subprocess.run(asked, capture_output=True, text=True)
    if not done.stdout:
        print(f"audit: {name}: nothing looked up, no answer: {(done.stderr.splitlines() or ['?'])[-1]}")
        return []
    answers = json.loads(done.stdout)["dependencies"]
    unknown = sum("skip_reason" in a for a in answers)
    print(f"audit: {name}: {len(answers) - unknown} packages looked up; of {unknown} the index has no advisories")
    return [
        f"{name}: {a['name']} {a['version']}: {v['id']}, mended in {', '.join(v['fix_versions']) or 'no version'}"
        for a in answers
        for v in a.get("vulns", ())
    ]


def main() -> int:
    asked: set[str] = set()
    found: list[str] = []
    for lock in sorted((ROOT / "requirements").glob("*.txt")):
        pinned = [line for line in lock.read_text().splitlines() if "==" in line and not line.startswith("#")]
        found += audit(lock.name, [line for line in pinned if line not in asked])
        asked.update(pinned)
    print("".join(f"audit: {line}\n" for line in found), end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
