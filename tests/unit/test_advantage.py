"""Advantages against hand-worked values."""

from dataclasses import replace

import pytest

from forge.advantage import EQUAL_REWARDS, NO_VALID_EPISODES, group_advantages, with_advantages
from forge.testing import fake_completion, fake_group


def test_group_statistics_use_the_sample_standard_deviation() -> None:
    # mean 0.25; squares 0.5625 + 3 * 0.0625 = 0.75; 0.75 / 3 = 0.25; std 0.5
    assert group_advantages([1, 0, 0, 0], scale_by_std=True) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_shift_and_scale_of_rewards_do_not_change_advantages() -> None:
    assert group_advantages([9, 5, 5, 5], scale_by_std=True) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_without_scaling_advantages_are_reward_minus_mean() -> None:
    assert group_advantages([9, 5, 5, 5], scale_by_std=False) == pytest.approx([3, -1, -1, -1])


def test_equal_rewards_that_are_not_exact_in_binary_give_exactly_zero() -> None:
    assert group_advantages([0.1] * 8, scale_by_std=True) == [0.0] * 8


def test_each_group_has_its_own_statistics() -> None:
    a = with_advantages(fake_group(0, [1, 0, 0, 0]), scale_by_std=True, keep_equal=False)
    b = with_advantages(fake_group(1, [9, 5, 5, 5]), scale_by_std=True, keep_equal=False)
    assert [e.advantage for e in a.episodes] == pytest.approx([e.advantage for e in b.episodes], rel=1e-5)


def test_equal_rewards_drop_the_group_unless_a_kl_term_wants_it() -> None:
    group = fake_group(0, [1, 1, 1])
    assert with_advantages(group, scale_by_std=True, keep_equal=False).dropped == EQUAL_REWARDS
    assert with_advantages(group, scale_by_std=True, keep_equal=True).dropped is None


def test_a_failed_episode_leaves_its_siblings_statistics_alone() -> None:
    group = fake_group(0, [1, 0, 0, 0])
    broken = replace(group.episodes[2], reward=None, failure="raised ValueError")
    group = replace(group, episodes=(*group.episodes[:2], broken, group.episodes[3]))
    result = with_advantages(group, scale_by_std=True, keep_equal=False)
    # of [1, 0, 0]: mean 1/3, std sqrt((4/9 + 1/9 + 1/9) / 2) = 0.57735
    assert [e.advantage for e in result.episodes] == pytest.approx([1.1547, -0.57735, 0, -0.57735], rel=1e-4)


def test_an_empty_completion_with_a_huge_reward_does_not_move_the_baseline() -> None:
    group = fake_group(0, [100, 1, 0])
    empty = replace(group.episodes[0], completion=fake_completion(0, num_tokens=0))
    result = with_advantages(
        replace(group, episodes=(empty, *group.episodes[1:])), scale_by_std=False, keep_equal=False
    )
    assert [e.advantage for e in result.episodes] == [0.0, 0.5, -0.5]


def test_one_valid_episode_has_nothing_to_compare_with() -> None:
    group = fake_group(0, [1, 0])
    lone = replace(group, episodes=(group.episodes[0], replace(group.episodes[1], reward=None, failure="x")))
    assert with_advantages(lone, scale_by_std=True, keep_equal=False).dropped == NO_VALID_EPISODES
