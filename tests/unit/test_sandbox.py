"""What a sandboxed program can do, and what it cannot: every escape is tried for real, and works outside of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from forge.errors import ConfigError
from forge.sandbox import MAX_TEXT, Outcome, confined, run_python, sandbox_problem


def run(code: str, *, stdin: str = "", timeout_s: float = 10.0, memory_mb: int = 256) -> Outcome:
    """Run, and check that nothing is left: no process, no folder."""
    folders = set(Path(tempfile.gettempdir()).glob("forge-sandbox-*"))
    outcome = run_python(code, stdin=stdin, timeout_s=timeout_s, memory_mb=memory_mb)
    assert [p for p in psutil.process_iter(["cmdline"]) if confined.__file__ in (p.info["cmdline"] or ())] == []
    assert set(Path(tempfile.gettempdir()).glob("forge-sandbox-*")) == folders
    return outcome


def test_a_program_computes_reads_its_input_and_keeps_files() -> None:
    code = """
import collections, json, math, random, re, threading
numbers = [int(n) for n in input().split()]
with open("kept.txt", "w") as file:
    file.write(str(sum(numbers)))
thread = threading.Thread(target=lambda: print(open("kept.txt").read()))
thread.start()
thread.join()
import os
os.mkdir("d"); os.rename("kept.txt", "d/k"); os.remove("d/k"); os.rmdir("d")
raise SystemExit(3)
"""
    ended = run(code, stdin="4 5\n")
    assert (ended.status, ended.stdout, ended.stderr, ended.failure) == (3, "9\n", "", None)


ESCAPES = {
    "tcp": "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "udp": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "unix socket": "import socket; socket.socketpair()",
    "read the system": "open('/etc/hostname').read()",
    "read the home": "import os; os.listdir({home!r})",
    "read a file of the caller": "open({secret!r}).read()",
    "read its own program": "open('../program.py').read() if __name__ == '__main__' else None",
    "own memory": "open('/proc/self/mem', 'rb')",
    "environment of the caller": "import os; open(f'/proc/{{os.getppid()}}/environ', 'rb').read()",
    "write elsewhere": "open({elsewhere!r}, 'w')",
    "delete elsewhere": "import os; os.remove({victim!r})",
    "truncate elsewhere": "import os; os.truncate({victim!r}, 0)",
    "link out": "import os; os.symlink({secret!r}, 'l'); open('l').read()",
    "hard link out": "import os; os.link({secret!r}, 'l')",
    "chmod": "import os; os.chmod({victim!r}, 0)",
    "fork": "import os; os.fork() or os._exit(0)",
    "command": "import subprocess; subprocess.run(['true'], check=True)",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "multiprocessing": "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "signal": "import os; os.kill(os.getppid(), 0)",
    "trace": "import ctypes; l = ctypes.CDLL(None, use_errno=True); assert l.ptrace(0, 0, 0, 0) == 0",
    "namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "memory file": "import os; os.memfd_create('x')",
    "raw system call": "import ctypes; assert ctypes.CDLL(None).syscall({socket}, 2, 1, 0) >= 0",
    "limits": "import resource as r; r.setrlimit(r.RLIMIT_CORE, (-1, -1)); assert r.getrlimit(r.RLIMIT_AS)[0] == -1",
}
REASONS = ("PermissionError", "Operation not permitted", "AssertionError", "not allowed")


@pytest.mark.parametrize("escape", ESCAPES)
def test_an_escape_works_outside_and_fails_inside(escape: str, tmp_path: Path) -> None:
    import socket

    secret, victim, elsewhere = (tmp_path / n for n in ("secret", "victim", "elsewhere"))
    secret.write_text("secret")
    victim.write_text("here")
    server = socket.create_server(("127.0.0.1", 0))
    number = 41 if os.uname().machine == "x86_64" else 198
    code = ESCAPES[escape].format(
        port=server.getsockname()[1], home=str(Path.home()), secret=str(secret), victim=str(victim),
        elsewhere=str(elsewhere), socket=number,
    )  # fmt: skip
    ended = run(code)
    assert (ended.failure, ended.status) == (None, 1), ended
    assert any(reason in ended.stderr for reason in REASONS)
    assert (secret.read_text(), victim.read_text(), elsewhere.exists()) == ("secret", "here", False)

    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "program.py").write_text(code)
    free = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=outside, capture_output=True, text=True)
    if os.getuid() == 0 or escape not in ("limits", "namespace"):
        assert free.returncode == 0, free.stderr
    server.close()


def test_nothing_of_the_callers_environment_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    assert "secret" not in run("import os; print(dict(os.environ))").stdout


@pytest.mark.parametrize(
    ("bomb", "ends"),
    [
        ("while True: pass", "timeout"),
        ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", "timeout"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
        ("import os\nfor i in range(10**6): open(str(i), 'w').close()", "files"),
        ("import os\nfor i in range(10**6): open(str(i), 'wb').write(bytes(2 << 20))", "files"),
        ("bytearray(10**11)", None),
        ("x = []\nwhile True: x.append(bytes(10**6))", None),
        ("import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()", "timeout"),
        ("open('big', 'wb').write(bytes(10**8))", None),
        ("while True: print('x' * 1000)", None),
    ],
)
def test_a_bomb_ends_and_costs_no_more_than_its_limits(bomb: str, ends: str | None) -> None:
    start = time.monotonic()
    ended = run(bomb, timeout_s=2.0, memory_mb=200)
    assert ended.failure == ends
    assert ended.status != 0
    assert time.monotonic() - start < 30
    assert len(ended.stdout) <= MAX_TEXT


def test_bytes_that_are_no_text_and_a_cut_off_output_are_taken() -> None:
    ended = run("import sys; sys.stdout.buffer.write(b'a\\xff' + b'b' * 100000)")
    assert ended.stdout.startswith("a\ufffdbbb")
    assert ended.status == 0


def test_a_machine_that_cannot_confine_it_runs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert sandbox_problem() is None
    monkeypatch.setattr(confined, "landlock_version", lambda: -1)
    with pytest.raises(ConfigError, match="needs Landlock"):
        run_python(f"open({str(tmp_path / 'ran')!r}, 'w')", timeout_s=5, memory_mb=100)
    assert list(tmp_path.iterdir()) == []


def test_the_filter_of_either_machine_allows_what_it_should() -> None:
    for machine in confined.AUDIT_ARCH:
        program = confined.syscall_filter(machine)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096  # what a kernel takes
