"""Shared memory of the processes of one host: what readers see, and when it is used again."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch

from forge.errors import PartFailed
from forge.segments import ALIGNMENT, Segment, SegmentPool, layout, mapped, views, write
from forge.types import TensorSpec

DTYPES = ("float32", "bfloat16", "float16", "int8", "uint8", "int32", "int64")
READER = textwrap.dedent(
    """
    import sys
    from forge.segments import Segment, mapped
    path, inode, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    flat = mapped(Segment(path, inode, size))
    print(int(flat.sum()), flush=True)
    sys.stdin.read()
    """
)
OWNER = textwrap.dedent(
    """
    import sys, torch
    from forge.segments import SegmentPool, write
    pool = SegmentPool()
    segment = pool.take(4096)
    write(segment, [(0, torch.ones(4096, dtype=torch.uint8))])
    pool.publish(segment)
    print(segment.path, segment.inode, segment.size, flush=True)
    sys.stdin.read()
    """
)


@pytest.fixture
def pool() -> Iterator[SegmentPool]:
    made = SegmentPool()
    yield made
    made.close()


def published(pool: SegmentPool, value: int, size: int = 4096) -> Segment:
    segment = pool.take(size)
    write(segment, [(0, torch.full((size,), value, dtype=torch.uint8))])
    pool.publish(segment)
    return segment


def reader(segment: Segment) -> subprocess.Popen[str]:
    """A process that has mapped a segment, and says the sum of what it sees."""
    return subprocess.Popen(
        [sys.executable, "-c", READER, segment.path, str(segment.inode), str(segment.size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_tensors_of_every_dtype_and_shape_come_back() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((), (0, 3), (1,), (7, 5), (3, 2, 4))
    specs = {f"{d} {s}": TensorSpec(shape=s, dtype=d) for d in DTYPES for s in shapes}
    tensors = {
        name: torch.randint(-100 if s.dtype != "uint8" else 0, 100, s.shape, generator=generator).to(
            getattr(torch, s.dtype)
        )
        for name, s in specs.items()
    }
    offsets, size = layout(specs)
    assert all(offset % ALIGNMENT == 0 for offset in offsets.values())
    pool = SegmentPool()
    segment = pool.take(size)
    write(segment, ((offsets[name], t) for name, t in tensors.items()))
    pool.publish(segment)
    found = views(mapped(segment), specs)
    assert list(found) == list(specs)
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name
    pool.close()


def test_rows_and_columns_out_of_order_are_written_as_they_read(pool: SegmentPool) -> None:
    whole = torch.arange(24, dtype=torch.int32).view(4, 6)
    segment = pool.take(96)
    write(segment, [(48, whole[2:]), (0, whole[:2].t().contiguous().t())])  # the second is not contiguous
    pool.publish(segment)
    assert torch.equal(mapped(segment)[:96].view(torch.int32).view(4, 6), whole)


def test_a_segment_is_used_again_once_it_is_free(pool: SegmentPool) -> None:
    first = published(pool, 1)
    pool.give_back(first)
    assert pool.take(4096) == first
    assert pool.take(4096) != first, "a segment that is taken is not handed out twice"


def test_the_smallest_free_segment_that_fits_is_taken(pool: SegmentPool) -> None:
    sizes = [3000, 1000, 2000]
    made = {size: published(pool, 0, size) for size in sizes}
    for segment in made.values():
        pool.give_back(segment)
    assert pool.take(1500) == made[2000]
    assert pool.take(1500) == made[3000]
    assert pool.take(1500).size == 1500
    assert pool.take(1000) == made[1000]


def test_a_reader_keeps_its_version_while_it_has_any_tensor_of_it(pool: SegmentPool) -> None:
    segment = published(pool, 7)
    row = mapped(segment)[100:110]
    pool.give_back(segment)
    other = published(pool, 8)
    assert other != segment
    assert row.tolist() == [7] * 10
    del row
    assert pool.take(4096) == segment


def test_a_reader_that_comes_too_late_is_told(pool: SegmentPool) -> None:
    segment = published(pool, 7)
    pool.give_back(segment)
    assert pool.take(4096) == segment
    with pytest.raises(PartFailed, match="holds another version"):
        mapped(segment)


def test_what_a_reader_writes_stays_its_own(pool: SegmentPool) -> None:
    segment = published(pool, 3)
    mine = mapped(segment)
    mine.fill_(9)
    assert mapped(segment)[0] == 3


def test_a_tensor_that_outlives_its_lease_is_refused(pool: SegmentPool) -> None:
    flat = mapped(published(pool, 3))
    lease, kept = flat.lease, flat[:4]
    del flat
    with pytest.raises(PartFailed, match="still held"):
        lease.end()
    del kept
    lease.end()


def test_the_lease_of_a_killed_reader_ends(pool: SegmentPool) -> None:
    segment = published(pool, 5)
    with reader(segment) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == 5 * 4096
        pool.give_back(segment)
        assert published(pool, 6) != segment
        process.kill()
    assert pool.take(4096) == segment


def test_a_reader_survives_the_death_of_the_owner_and_nothing_stays_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path, inode, size = owner.stdout.readline().split()
        segment = Segment(path, int(inode), int(size))
        flat = mapped(segment)
        owner.kill()
    assert int(flat.sum()) == 4096
    assert set(os.listdir("/dev/shm")) == before
    with pytest.raises(PartFailed, match="cannot be opened"):
        mapped(segment)


def test_a_descriptor_that_means_other_memory_now_is_refused(pool: SegmentPool) -> None:
    segment = published(pool, 1)
    pool.close()
    again = published(pool, 2)
    assert again.path == segment.path, "the system gives the lowest free number"
    with pytest.raises(PartFailed, match="its version was freed"):
        mapped(segment)
