"""`forge APP …`, the same as `python -m apps.APP …`."""

from __future__ import annotations

import importlib
import sys

APPS = {
    "grpo": "train a model by GRPO",
    "plan": "show what a configuration would start, and load nothing",
    "quantize": "quantize a model folder or a run's checkpoint",
    "verify": "check an exported quantized folder against its proof",
    "fetch": "get a model that Forge can build from a package",
    "chaos": "kill random parts of small jobs and check what must hold",
    "bench": "measure Forge against its peers and limits",
}


def main() -> None:
    """Dispatch to an app. Ends the process with the app's status."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write("usage: forge APP [arguments]\n\n")
        for name, text in APPS.items():
            sys.stdout.write(f"  {name:8} {text}\n")
        sys.stdout.write("\nforge APP --help tells more.\n")
        sys.exit(0 if arguments else 2)
    app, rest = arguments[0], arguments[1:]
    if app not in APPS:
        import difflib

        near = difflib.get_close_matches(app, APPS, n=1)
        sys.stderr.write(
            f"forge: no app {app!r}: {', '.join(APPS)} exist{f'; did you mean {near[0]}?' if near else ''}\n"
        )
        sys.exit(2)
    status = importlib.import_module(f"forge.apps.{app}").main(rest)
    from forge.apps.common import exit_now

    exit_now(status)


if __name__ == "__main__":
    main()
