import json
import math
import random
from itertools import pairwise

import pytest

from forge.metrics import Last, Max, Mean, Min, Std, Sum, merge, reduce, rollout_metrics
from forge.types import Completion, Episode, FinishReason, Group, Prompt

NAN = math.nan


def episode(
    reward: float | None = 1.0,
    *,
    member: int = 0,
    tokens: int = 4,
    versions: tuple[int, ...] = (),
    rewards: dict[str, float] | None = None,
    failure: str | None = None,
    finish: FinishReason = FinishReason.STOP,
) -> Episode:
    return Episode(
        prompt=Prompt(id="sums:0", question="1 + 1 =", answer="2", token_ids=(1, 2, 3)),
        completion=Completion(
            token_ids=tuple(range(tokens)),
            logprobs=(-0.5,) * tokens,
            versions=versions or (0,) * tokens,
            text="2",
            finish_reason=finish,
        ),
        group=0,
        member=member,
        reward=reward,
        rewards=rewards or {},
        failure=failure,
    )


def group(*episodes: Episode, index: int = 0, dropped: str | None = None) -> Group:
    return Group(index=index, episodes=episodes, dropped=dropped)


def test_a_mean_of_parts_of_two_and_one_weighs_every_sample_once() -> None:
    # rewards 1, 1 | 0: 2/3, not the mean of means (1 + 0) / 2 = 0.5
    merged = merge([{"reward": Mean.of([1.0, 1.0])}, {"reward": Mean.of([0.0])}])
    assert reduce(merged)["reward"] == pytest.approx(2 / 3, rel=1e-12)


def test_one_part_and_two_parts_reduce_to_the_same_mean() -> None:
    values = [0.1, 0.7, 0.7, 0.2, 1.0]
    assert Mean.of(values[:2]).merge(Mean.of(values[2:])).value() == pytest.approx(Mean.of(values).value(), rel=1e-12)


def test_a_mean_respects_weights() -> None:
    # (1 * 30 + 0 * 10) / 40
    assert Mean.of([1.0, 0.0], weights=[30, 10]).value() == pytest.approx(0.75, rel=1e-12)


def test_none_and_nan_are_left_out_of_a_mean_with_their_weight() -> None:
    mean = Mean.of([1.0, None, NAN, 0.0], weights=[1, 100, 100, 1])
    assert mean.value() == 0.5
    assert mean.count == 2


@pytest.mark.parametrize("kind", [Mean, Std, Sum, Max, Min])
def test_merging_is_associative_and_neutral_on_the_empty_value(kind: type[Mean]) -> None:
    values = [random.Random(7).uniform(-3, 3) for _ in range(9)]
    a, b, c = kind.of(values[:2]), kind.of(values[2:3]), kind.of(values[3:])
    whole = kind.of(values).value()
    assert a.merge(b).merge(c).value() == pytest.approx(whole, rel=1e-12)
    assert a.merge(b.merge(c)).value() == pytest.approx(whole, rel=1e-12)
    assert kind().merge(kind.of(values)).merge(kind()).value() == pytest.approx(whole, rel=1e-12)


def test_a_deviation_is_the_sample_deviation() -> None:
    # [1, 0, 0, 0]: mean 1/4, squares 9/16 + 3/16 = 3/4, /3 = 1/4, root 1/2
    assert Std.of([1, 0, 0, 0]).value() == pytest.approx(0.5, rel=1e-12)


def test_the_newest_present_value_wins() -> None:
    assert Last(1.0).merge(Last(2.0)).merge(Last()).value() == 2.0


def test_empty_values_are_absent_and_never_raise() -> None:
    assert reduce({"a": Mean.of([]), "b": Max.of([]), "c": Min.of([NAN]), "d": Std.of([1.0]), "e": None}) == {}


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    row = reduce({"a": math.inf, "b": NAN, "c": Sum.of([math.inf, -math.inf]), "d": Mean.of([-math.inf]), "e": 1})
    assert row == {"e": 1.0, "metrics/not_finite": 4.0}


def test_two_parts_that_reduce_a_name_differently_are_refused() -> None:
    with pytest.raises(TypeError, match="metric 'x' is Mean in one part and Max"):
        merge([{"x": Mean.of([1])}, {"x": Max.of([1])}])


def test_a_component_that_is_missing_on_half_the_rows_is_averaged_over_the_others() -> None:
    # exact: 1, 0 on two of four rows; a NaN would have wiped it
    groups = [
        group(
            episode(1.0, rewards={"exact": 1.0, "format": 1.0}),
            episode(0.5, rewards={"format": 0.5}),
            episode(0.0, rewards={"exact": 0.0, "format": 0.5}),
            episode(0.5, rewards={"exact": NAN, "format": 0.0}),
        )
    ]
    row = rollout_metrics(groups, version=0, group_size=4)
    assert (row["reward/exact"], row["reward/exact/count"]) == (0.5, 2.0)
    assert (row["reward/format"], row["reward/format/count"]) == (0.5, 4.0)


def test_failed_episodes_are_counted_and_not_averaged() -> None:
    groups = [group(episode(1.0), episode(None, failure="timeout"), episode(0.0), episode(NAN))]
    row = rollout_metrics(groups, version=0, group_size=4)
    assert (row["reward/mean"], row["reward/failed"], row["reward/count"]) == (0.5, 2.0, 2.0)


def test_a_component_named_like_the_scalar_does_not_overwrite_it() -> None:
    row = rollout_metrics([group(episode(1.0, rewards={"mean": 0.25}))], version=0, group_size=1)
    assert (row["reward/mean"], row["reward/component/mean"]) == (1.0, 0.25)


def test_deviation_within_groups_differs_from_deviation_over_all() -> None:
    # groups (0, 0) and (1, 1): no spread within, sqrt(1/3) over all four
    groups = [group(episode(0.0), episode(0.0)), group(episode(1.0), episode(1.0))]
    row = rollout_metrics(groups, version=0, group_size=2)
    assert row["reward/group_std"] == 0.0
    assert row["reward/std"] == pytest.approx(math.sqrt(1 / 3), rel=1e-12)


def test_lengths_and_truncation() -> None:
    groups = [group(episode(tokens=2), episode(tokens=10, finish=FinishReason.LENGTH))]
    row = rollout_metrics(groups, version=0, group_size=2)
    assert row["completion/tokens_mean"] == 6.0
    assert row["completion/tokens_max"] == 10.0
    assert row["completion/truncated_share"] == 0.5
    assert (row["tokens/completion"], row["tokens/prompt"]) == (12.0, 6.0)


def test_groups_are_counted_by_fate() -> None:
    groups = [
        group(episode(), episode()),
        group(episode(), episode(), dropped="equal_rewards"),
        group(episode(), dropped="equal_rewards"),
        group(dropped="odd"),
    ]
    row = rollout_metrics(groups, version=0, group_size=2)
    assert {k: v for k, v in row.items() if k.startswith("group/")} == {
        "group/count": 4.0,
        "group/kept": 1.0,
        "group/incomplete": 2.0,
        "group/dropped_equal_rewards": 2.0,
        "group/dropped_odd": 1.0,
        "group/dropped_too_few_valid_episodes": 0.0,
    }


def test_age_is_measured_from_the_oldest_token_of_the_group() -> None:
    groups = [
        group(episode(tokens=2, versions=(5, 5)), episode(tokens=3, versions=(3, 4, 5))),  # oldest 3: age 2
        group(episode(tokens=1, versions=(5,))),  # age 0
        group(episode(tokens=1, versions=(5,))),  # age 0
        group(episode(tokens=0)),  # no token: no age
    ]
    row = rollout_metrics(groups, version=5, group_size=2)
    assert {k: v for k, v in row.items() if k.startswith("age/")} == {
        "age/mean": pytest.approx(2 / 3, rel=1e-12),
        "age/max": 2.0,
        "age/0": 2.0,
        "age/1": 0.0,
        "age/2": 1.0,
    }


def test_the_age_histogram_adds_up_to_the_groups() -> None:
    groups = [group(episode(tokens=1, versions=(v,)), index=v) for v in (0, 1, 1, 4)]
    row = rollout_metrics(groups, version=4, group_size=1)
    buckets = sorted(int(k[4:]) for k in row if k[4:].isdigit())
    assert all(b - a == 1 for a, b in pairwise(buckets))
    assert sum(row[f"age/{b}"] for b in buckets) == 4.0


@pytest.mark.parametrize("groups", [[], [group()], [group(episode(None, tokens=0, failure="x"))]])
def test_a_step_without_data_raises_nothing_and_stays_strict_json(groups: list[Group]) -> None:
    row = rollout_metrics(groups, version=3, group_size=8)
    assert "reward/mean" not in row
    assert json.loads(json.dumps(row, allow_nan=False)) == row
