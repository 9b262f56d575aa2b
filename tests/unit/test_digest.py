"""Digests: they add up over shards, and notice what can go wrong with a tensor on its way."""

from random import Random

import pytest
import torch
from torch import Tensor

from forge.digest import CHUNK, ROW, M, digest

SHAPES = [(64, 24), (7, 5), (10,), (33, 3, 4), (1, 1), (0, 4), (5, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.float8_e4m3fn]


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(torch.float32).to(dtype)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_chunks_and_rows_of_words_join() -> None:
    tensor = random((CHUNK + 3 * ROW + 5,), torch.int64)
    total = 0
    for word in reversed(tensor.tolist()):  # Horner's rule
        total = (total * M + word) % 2**64
    assert digest(tensor) == total


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float32])
def test_it_is_the_sum_that_it_says(dtype: torch.dtype) -> None:
    tensor = random((9,), dtype)
    signed = {2: "<h", 4: "<i"}[tensor.element_size()]
    words = memoryview(bytes(bytes_of(tensor).tolist())).cast("B").cast(signed[1])
    assert digest(tensor) == sum(w * M**i for i, w in enumerate(words)) % 2**64


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_of_rows_add_up(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random(shape, dtype)
    for seed in range(5):
        cuts = sorted(Random(seed).choices(range(shape[0] + 1), k=3))
        bounds = list(zip([0, *cuts], [*cuts, shape[0]], strict=True))
        assert sum(digest(tensor[a:b], first_row=a) for a, b in bounds) % 2**64 == digest(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 8), (7, 5)])
def test_every_flipped_bit_is_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random(shape, dtype)
    whole = digest(tensor)
    seen = set()
    for position in range(bytes_of(tensor).numel()):
        for bit in range(8):
            damaged = tensor.clone()
            bytes_of(damaged)[position] ^= 1 << bit
            seen.add(digest(damaged))
    assert whole not in seen


def test_rows_that_trade_places_or_are_lost_or_stale_are_seen() -> None:
    tensor = random((16, 8), torch.bfloat16)
    shuffled, lost, stale = tensor.flip(0), tensor.clone(), tensor.clone()
    lost[3] = 0
    stale[5:9] = random((16, 8), torch.bfloat16, seed=1)[5:9]
    assert len({digest(t) for t in (tensor, shuffled, lost, stale, tensor.t().contiguous())}) == 5


def test_strides_and_offsets_do_not_matter() -> None:
    base = random((33,), torch.bfloat16)
    assert digest(base[1:]) == digest(base[1:].clone())
    square = random((16, 16), torch.bfloat16)
    assert digest(square.t()) == digest(square.t().contiguous())
    columns = random((16, 20), torch.bfloat16)[:, 3:11]
    assert digest(columns) == digest(columns.clone())
