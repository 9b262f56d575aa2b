"""Files a user names: what is not a regular file, not JSON or not a path is said in one line."""

import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from forge.errors import ConfigError
from forge.files import check_regular, expand, path_problem, read_json, scratch_folder


def test_json_is_read_with_and_without_a_byte_order_mark(tmp_path: Path) -> None:
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "a.json").write_bytes(mark + '{"ä": 1}'.encode())
        assert read_json(tmp_path / "a.json") == {"ä": 1}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{", b"[" * 100_000, b'{"a": NaN}'])
def test_what_is_not_json_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        read_json(tmp_path / "a.json")


def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="is not a regular file"):
            check_regular(path)


def test_no_home_folder_is_a_refusal() -> None:
    with pytest.raises(ConfigError, match="write the path in full"):
        expand("~nosuchuser/x")
    assert expand("~/x") == Path.home() / "x"


def test_paths_that_no_file_system_holds() -> None:
    assert path_problem("a/b.jsonl") is None
    assert path_problem("a" * 255) is None
    assert "255 bytes" in str(path_problem("ä" * 128))
    assert "4095" in str(path_problem("a/" * 2048))
    assert "null byte" in str(path_problem("a\0b"))


OWNER = """
import sys
from forge.files import scratch_folder
with scratch_folder() as folder:
    (folder / "model").write_text("large")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_scratch_folder_is_gone_afterwards_and_killed_owners_are_cleared_up_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "forge-of-someone").mkdir()
    start = partial(subprocess.Popen, [sys.executable, "-c", OWNER], stdin=-1, stdout=-1, text=True)
    with start() as killed, start() as alive:
        assert killed.stdout is not None
        assert alive.stdout is not None
        left, held = (Path(p.stdout.readline().strip()) for p in (killed, alive))
        killed.kill()
        killed.wait()
        assert (left / "model").exists()
        with scratch_folder() as own:
            assert own.is_dir()
            assert not left.exists()
            assert (held / "model").exists()
        assert not own.exists()
        alive.kill()
    assert (tmp_path / "forge-of-someone").exists(), "what holds no lock file is not Forge's"
