"""What of the Monarch adapter needs no processes; the rest is in tests/e2e."""

import os

import pytest

from forge.mesh import gpus_of


@pytest.mark.parametrize(
    ("rank", "count", "gpus", "visible"),
    [(0, 1, range(1), "0"), (1, 2, range(4, 8), "6,7"), (2, 4, range(3, 7), "5"), (0, 1, range(0), "")],
)
def test_each_process_sees_its_share_of_the_parts_gpus(rank: int, count: int, gpus: range, visible: str) -> None:
    assert gpus_of(rank, count, gpus) == visible


def test_the_frame_limit_is_set_before_monarch_reads_it() -> None:
    assert int(os.environ["HYPERACTOR_CODEC_MAX_FRAME_LENGTH"]) >= 10 * 2**30
