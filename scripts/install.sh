#!/bin/sh
# Builds .venv: a Python environment with Forge and the exact package set of requirements/, for this machine's hardware.
# Does nothing when .venv is already that. A .venv that an interrupted run left half-built is made anew.
#
#   PYTHON=python3.12      which interpreter (3.11 or 3.12) the environment is made from
#   FORGE_STACK=cpu|cuda   overrides the choice by hardware
set -eu
cd "$(dirname "$0")/.."

PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
LOG=.venv/install.log

fail() { echo "install: $*" >&2; exit 1; }

if [ -z "${FORGE_STACK:-}" ]; then
    FORGE_STACK=cpu
    if [ -e /dev/nvidiactl ] || nvidia-smi -L >/dev/null 2>&1; then FORGE_STACK=cuda; fi
fi
LOCK=requirements/$FORGE_STACK.txt
[ -f "$LOCK" ] || fail "FORGE_STACK must be cpu or cuda, got $FORGE_STACK"

# Everything the environment depends on, its place included: a virtual environment cannot be moved.
key=$({ pwd; uname -sm; cat "$LOCK" scripts/install.sh scripts/check_stack.py; } | cksum | cut -d' ' -f1)
stamp=.venv/forge-installed-$key                                 # written last
linked=.venv/forge-linked-$(cksum <pyproject.toml | cut -d' ' -f1)
[ -f "$stamp" ] && [ -f "$linked" ] && [ -x .venv/bin/python ] && exit 0

right_version() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; }

find_python() {
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if right_version "$candidate"; then command -v "$candidate"; return; fi
    done
    found=$("${PYTHON:-python3}" --version 2>/dev/null || echo "no ${PYTHON:-python3}")
    fail "needs Python 3.11 or 3.12, found $found; install one or set PYTHON=/path/to/it"
}

started=$(date +%s)
stage() { printf 'install: %4ds  %s\n' "$(($(date +%s) - started))" "$*"; }

# --no-deps: the lock is complete, and pip would refuse it (torchstore's metadata pins an older torch).
# --no-compile: byte code is made at the end, by all cores.
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq install --no-deps --no-compile "$@" >>"$LOG" 2>&1; }

explain() { grep -v '^WARNING' "$LOG" | tail -n 15 >&2; fail "$1 (above: the end of $LOG); run the same command again to retry"; }

link_forge() {
    rm -f .venv/forge-linked-*
    pip --no-build-isolation -e . || explain "Forge itself could not be installed"
    touch "$linked"
}

if [ -f "$stamp" ] && [ -x .venv/bin/python ]; then              # only pyproject.toml changed
    link_forge
    exit 0
fi

rmdir .venv 2>/dev/null || true
if [ -e .venv ]; then
    [ -f .venv/forge-building ] || fail ".venv exists and was not made by this script; move it away and try again"
    other=$(cat .venv/forge-building)
    [ -n "$other" ] && kill -0 "$other" 2>/dev/null && fail "another install (process $other) is at work in .venv; wait for it"
    rm -rf .venv
fi
python=$(find_python)
mkdir .venv
echo $$ >.venv/forge-building

stage "$("$python" --version) environment in .venv, packages for $FORGE_STACK"
"$python" -m venv .venv >>"$LOG" 2>&1 || explain "python -m venv failed (on Debian and Ubuntu: apt install python3-venv)"

torch=$(grep '^torch==' "$LOCK")
stage "$torch"
if ! pip "$torch"; then
    [ "$FORGE_STACK" = cpu ] || explain "$torch could not be installed"
    pip --index-url "$PYTORCH_CPU_INDEX" "$torch" || explain "$torch is on neither the configured index nor $PYTORCH_CPU_INDEX"
fi

stage "vLLM, Monarch, TorchTitan and $(grep -c == "$LOCK") packages in all"
pip -r "$LOCK" || explain "the packages of $LOCK could not be installed"

stage "Forge"
link_forge

# A run starts a process for every part of it. Without byte code on disk each of them compiles all that it imports, twice
# the time to start; where PYTHONDONTWRITEBYTECODE is set, as in many containers, no import would ever write it.
stage "byte code"
.venv/bin/python -m compileall -q -j 0 .venv/lib >>"$LOG" 2>&1 || true   # some packages ship files for other Pythons

stage "importing everything once"
.venv/bin/python scripts/check_stack.py 2>>"$LOG" || explain "the environment is incomplete"

: >.venv/forge-building
touch "$stamp"
stage "done"
