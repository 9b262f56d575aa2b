"""Errors keep what they carry, also across processes."""

import pickle

from forge.errors import ConfigError, DataError, ForgeError, PartFailed, RefusedInput, WeightsMismatch


def test_refusals_end_with_2_and_failures_with_1() -> None:
    assert ConfigError("x").exit_code == DataError("x").exit_code == 2
    assert PartFailed("reward", "x").exit_code == 1


def test_a_refusal_lists_every_problem_on_a_line() -> None:
    assert str(ConfigError(["a is wrong", "b is wrong"])) == "a is wrong\nb is wrong"
    assert isinstance(ConfigError("a"), ValueError)


def test_errors_survive_the_way_between_processes() -> None:
    errors: list[ForgeError] = [ConfigError(["a", "b"]), WeightsMismatch("generator 1", "missing x")]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
    refused = pickle.loads(pickle.dumps(errors[0]))
    assert isinstance(refused, RefusedInput)
    assert refused.problems == ("a", "b")


def test_a_failure_names_its_part() -> None:
    error = WeightsMismatch("generator 1", "missing x")
    assert (error.part, str(error)) == ("generator 1", "generator 1: missing x")
