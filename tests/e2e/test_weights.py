"""TorchStore on real Monarch processes: shards in, full tensors out, old versions gone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("ranks", [1, 3])
def test_shards_of_any_shape_come_out_as_they_went_in(ranks: int) -> None:
    script = Path(__file__).with_name("store_ranks.py")
    done = subprocess.run([sys.executable, str(script), str(ranks)], capture_output=True, text=True)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT")), None)
    assert line is not None, done.stderr
    found = json.loads(line.removeprefix("RESULT"))
    assert [set(version.values()) for version in found["equal"]] == [{True}, {True}]
    assert found["keys"] == sorted(f"2:/{n}" for n in ("uneven", "wide", "vector", "one", "four of three"))
    assert found["digests"]
    for fault, version, name in (("flipped bit", 4, "wide"), ("stale", 5, "vector")):
        assert f"version {version} is not what was published: 1 tensors have another digest" in found[fault]
        assert name in found[fault]
    assert "version 1 is not complete in the store" in found["freed"]
    assert "wide has a shard of 128128 bytes" in found["too_large"]
    assert "HYPERACTOR_CODEC_MAX_FRAME_LENGTH=100000" in found["too_large"]
    assert found["free from the dead"].startswith("weight store: its process died during delete")
    assert found["put from the dead"].startswith("weight store: its process died during put")
