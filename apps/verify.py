"""`forge verify FOLDER`: is an exported quantized folder still what was proven?

Every file is compared with its digest; then a fresh, stock vLLM loads the folder and scores the pinned texts of
parity.json again. Exit 0: it is; 2: a file is damaged or missing; 1: the log-probs differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forge.config import load_config
from forge.errors import PartFailed
from forge.files import scratch_folder


async def verify(folder: Path, placement: str, files_only: bool) -> None:
    """Compare digests, then log-probs."""
    from forge.model_folder import check_digests
    from forge.parity import MAX_GAP, gap, read_parity

    count = check_digests(folder)
    sys.stdout.write(f"{folder}: {count} files are as they were written\n")
    if files_only:
        return
    record = read_parity(folder)
    sequences = [row["token_ids"] for row in record["pinned"]]
    longest = max(map(len, sequences)) + 8
    config = load_config("grpo", [f"placement={placement}", f"model.max_len={longest}", "sampling.max_new_tokens=1"])
    from forge.actors.stock import score_in_stock_vllm

    with scratch_folder() as logs:
        stock = await score_in_stock_vllm(config, folder, sequences, logs=logs)
    found = gap(stock.logprobs, [row["logprobs"] for row in record["pinned"]])
    text = f"log-probs of {record['tokens']} pinned tokens differ by {found['mean']:.5f} on average from those recorded"
    if found["mean"] > MAX_GAP:
        raise PartFailed("verify", f"{folder}: {text}, more than {MAX_GAP}")
    sys.stdout.write(f"{folder}: {text}\n")


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns its exit status."""
    from forge.apps.common import supervised

    parser = argparse.ArgumentParser(
        prog="forge verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--placement", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--files-only", action="store_true", help="compare digests and start no engine")
    args = parser.parse_args(list(argv))
    return supervised(verify(args.folder, args.placement, args.files_only))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
