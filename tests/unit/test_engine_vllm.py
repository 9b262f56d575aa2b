"""What of the vLLM adapter needs no engine; the rest is in tests/e2e."""

import math
from types import SimpleNamespace

from forge.config import load_config
from forge.engine_vllm import _logprobs, compare, prepare_environment
from forge.types import TensorSpec


def spec(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype)


def test_every_difference_between_two_sets_of_tensors_is_named() -> None:
    expected = {"a": spec(2, 3), "b": spec(4), "c": spec(1)}
    found = {"a": spec(3, 2), "c": spec(1, dtype="float32"), "d": spec(9)}
    assert compare(expected, found) == [
        "missing b",
        "extra d",
        "a is bfloat16[3, 2], needs bfloat16[2, 3]",
        "c is float32[1], needs bfloat16[1]",
    ]
    assert compare(expected, dict(expected)) == []


def test_a_logprob_that_is_missing_or_not_finite_becomes_nan_and_the_others_stay() -> None:
    entries = [
        {5: SimpleNamespace(logprob=-0.5)},
        None,
        {7: SimpleNamespace(logprob=math.nan)},
        {8: SimpleNamespace(logprob=-math.inf)},
        {1: SimpleNamespace(logprob=-0.1)},  # another token's
        {9: SimpleNamespace(logprob=None)},
    ]
    values = _logprobs([5, 6, 7, 8, 2, 9], entries)
    assert values[0] == -0.5
    assert all(math.isnan(v) for v in values[1:])
    assert all(math.isnan(v) for v in _logprobs([1, 2], None))


def test_a_cpu_engine_gets_its_cache_size_and_stays_in_its_process() -> None:
    env = prepare_environment(load_config("grpo", ["generator.kv_cache_gib=2.5"]))
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in prepare_environment(load_config("grpo", ["placement=gpu"]))
