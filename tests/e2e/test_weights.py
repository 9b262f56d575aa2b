"""TorchStore on real Monarch processes: shards in, full tensors out, old versions gone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("ranks", "way"), [(1, "shared"), (3, "shared"), (3, "messages")])
def test_shards_of_any_shape_come_out_as_they_went_in(ranks: int, way: str) -> None:
    script = Path(__file__).with_name("store_ranks.py")
    done = subprocess.run([sys.executable, str(script), str(ranks), way], capture_output=True, text=True)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT")), None)
    assert line is not None, done.stderr
    found = json.loads(line.removeprefix("RESULT"))
    assert [set(version.values()) for version in found["equal"]] == [{True}, {True}]
    assert len(found["equal"][0]) == 6
    shared = way == "shared"
    names = ("uneven", "wide", "vector", "one", "four of three")
    assert found["keys"] == (["2:"] if shared else sorted(f"2:/{n}" for n in names))
    assert found["digests"]
    for fault, version, name in (("flipped bit", 4, "wide"), ("stale", 5, "vector")):
        assert f"version {version} is not what was published: 1 tensors have another digest" in found[fault]
        assert name in found[fault]
    assert "version 1 is not complete in the store" in found["freed"]
    assert found["held"], "a reader's version changed under it"
    assert ("tensors of shared memory are still held" if shared else "nothing raised") in found["kept"]
    # of versions 1 to 5 at most four lived at once; from then on segments are used again
    assert len(set(found["segments"])) == 1
    assert found["segments"][0] <= 5 if shared else found["segments"][0] == 0
    assert "wide has a shard of 128128 bytes" in found["too_large"]
    assert "HYPERACTOR_CODEC_MAX_FRAME_LENGTH=100000" in found["too_large"]
    for doing, named in (("free", "delete"), ("put", "put"), ("get", "get")):
        assert found[f"{doing} from the dead"].startswith(f"weight store: its process died during {named}")
