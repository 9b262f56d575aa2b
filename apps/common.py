"""What every command does around its pipeline: read the configuration, end with the right status."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from forge.config import SCHEMAS, GrpoConfig, flatten, load_config, to_yaml
from forge.errors import ForgeError, RefusedInput


def configured(app: str, argv: Sequence[str]) -> GrpoConfig | int:
    """The configuration that the arguments ask for, or the exit status when there is nothing to run."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a reward of one's own may lie in the folder one works in
    parser = argparse.ArgumentParser(
        prog=f"forge {app}",
        description="Arguments are key=value. Keys and their meaning: docs/config.md, or --keys.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config", metavar="FILE", help="a YAML file of keys; key=value on the command line wins")
    parser.add_argument("--show", action="store_true", help="print the resolved configuration and end")
    parser.add_argument("--keys", action="store_true", help="list every key with its type and end")
    args = parser.parse_intermixed_args(list(argv))
    if args.keys:
        for key, kind in flatten(SCHEMAS[app]):
            sys.stdout.write(f"{key}  {getattr(kind, '__name__', kind)}\n")
        return 0
    try:
        config = load_config(app, args.overrides, file=args.config)
    except RefusedInput as error:
        return refuse(error)
    if args.show:
        sys.stdout.write(to_yaml(config))
        return 0
    return config


def refuse(error: RefusedInput) -> int:
    """Print each problem on a line of its own; returns exit status 2."""
    for problem in error.problems:
        sys.stderr.write(f"forge: {problem}\n")
    return RefusedInput.exit_code


def supervised(work: Coroutine[Any, Any, None]) -> int:
    """Run the pipeline to its end; returns 0, 1 (a part failed), 2 (refused), 130 (Ctrl-C) or 143 (SIGTERM).

    The first signal cancels the pipeline, which closes its parts; a second one kills them at once.
    """
    received: list[int] = []

    async def main() -> None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number, task)
        await task

    def on_signal(number: int, task: asyncio.Task[None]) -> None:
        received.append(number)
        if len(received) == 1:
            sys.stderr.write("forge: ending; once more kills at once\n")
            task.cancel()
        else:
            kill_children()
            exit_now(128 + received[0])

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        return 128 + (received[0] if received else signal.SIGINT)
    except RefusedInput as error:
        return refuse(error)
    except ForgeError as error:
        sys.stderr.write(f"forge: failed: {error}\n")
        return error.exit_code
    return 128 + received[0] if received else 0


def kill_children() -> None:
    """SIGKILL every process that descends from this one."""
    import contextlib

    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def exit_now(status: int) -> None:
    """End without waiting for threads of vendors."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
