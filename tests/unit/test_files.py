"""Files a user names: what is not a regular file, not JSON or not a path is said in one line."""

import os
from pathlib import Path

import pytest

from forge.errors import ConfigError
from forge.files import check_regular, expand, path_problem, read_json


def test_json_is_read_with_and_without_a_byte_order_mark(tmp_path: Path) -> None:
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "a.json").write_bytes(mark + '{"ä": 1}'.encode())
        assert read_json(tmp_path / "a.json") == {"ä": 1}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{", b"[" * 100_000])
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
