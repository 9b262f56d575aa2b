"""The worker pool: what one bad reward call may and may not do. Real processes, no mocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from forge.errors import ConfigError, PartFailed
from forge.reward import MathReward, Reward, RewardPool
from forge.types import Completion, Episode, FinishReason, Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# this module has no name under which a worker could import it, like a notebook; classes travel by value
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def episode(member: int = 0, text: str = "", answer: str = "") -> Episode:
    return Episode(
        prompt=Prompt(id="t.jsonl:1", question="q", answer=answer, token_ids=(1,)),
        completion=Completion(
            token_ids=(1,), logprobs=(0.0,), versions=(0,), text=text, finish_reason=FinishReason.STOP
        ),
        group=0,
        member=member,
    )


class Act(Reward):
    """Does what the episode's text says; reports the worker's process id otherwise."""

    def __call__(self, episode: Episode) -> Any:
        match episode.text:
            case "raise":
                raise KeyError("no such column")
            case "hang":
                time.sleep(600)
            case "spin":
                while True:
                    pass
            case "none":
                return None
            case "nan":
                return float("nan")
            case "die":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hog":
                return float(len(bytearray(2 << 30)))
            case "quit":
                raise SystemExit(1)
            case "child":
                return float(subprocess.Popen(["sleep", "600"]).pid)
            case "parts":
                return {"a": 1.0, "b": 0.5, "c": None}
            case "torch":
                return float("torch" in sys.modules or "monarch" in sys.modules)
        return float(os.getpid())


def score_all(pool: RewardPool, *texts: str) -> list[Episode]:
    async def run() -> list[Episode]:
        return await asyncio.gather(*(pool.score(episode(i, text)) for i, text in enumerate(texts)))

    return asyncio.run(run())


@contextlib.contextmanager
def pool_of(reward: Reward, workers: int = 1, timeout_s: float = 5.0) -> Iterator[RewardPool]:
    with RewardPool(reward, workers=workers, timeout_s=timeout_s, memory_mb=256) as pool:
        asyncio.run(pool.start())
        yield pool


def is_gone(pid: int) -> bool:
    """True when the process has ended (a zombie counts: it runs nothing)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_gone(*pids: int, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if all(map(is_gone, pids)):
            return True
        time.sleep(0.02)
    return False


class ThirdFifthSixth(Reward):
    def __call__(self, episode: Episode) -> Any:
        if episode.member == 3:
            raise RuntimeError("boom")
        if episode.member == 5:
            time.sleep(600)
        return None if episode.member == 6 else float(episode.member)


def test_one_raising_one_hanging_and_one_empty_call_cost_only_their_own_episodes() -> None:
    with pool_of(ThirdFifthSixth(), workers=2, timeout_s=1.0) as pool:
        begun = time.monotonic()
        scored = score_all(pool, *[""] * 8)
        assert time.monotonic() - begun < 5.0  # 1 s for the hanging one, and a replacement worker
    assert [e.reward for e in scored] == [0.0, 1.0, 2.0, None, 4.0, None, None, 7.0]
    assert [e.member for e in scored if e.failure] == [3, 5, 6]
    assert scored[3].failure == "RuntimeError: boom"
    assert "longer than 1 s" in str(scored[5].failure)
    assert "None" in str(scored[6].failure)
    counts = pool.statistics()
    assert (counts.scored, counts.failed, counts.timeouts, counts.crashes) == (5, 3, 1, 0)


def test_every_fault_of_a_reward_fails_one_episode_and_the_next_is_scored() -> None:
    faults = {
        "raise": "KeyError: 'no such column'",
        "none": "None",
        "nan": "nan",
        "die": "status 3",
        "kill": "SIGKILL",
        "quit": "SystemExit",
        "hog": "out of memory: it asked for more than 256 MiB",
        "spin": "timeout",
    }
    with pool_of(Act(), timeout_s=2.0) as pool:
        for text, message in faults.items():
            (failed, good) = score_all(pool, text, "")
            assert failed.reward is None
            assert message in str(failed.failure)
            assert good.reward is not None
        counts = pool.statistics()
    assert (counts.scored, counts.failed, counts.timeouts, counts.crashes) == (8, 8, 1, 2)


def test_components_are_recorded_with_their_sum() -> None:
    with pool_of(Act()) as pool:
        (parts, plain) = score_all(pool, "parts", "torch")
    assert (parts.reward, parts.rewards) == (1.5, {"a": 1.0, "b": 0.5})
    assert plain.rewards == {"Act": 0.0}  # and no torch in a worker


def test_huge_powers_and_model_code_leave_the_grader_as_it_was(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    texts = [r"\boxed{9^{9^{9^{9}}}}", rf"\boxed{{open('{marker}','w')}}", rf"\boxed{{\pi + open('{marker}','w')}}"]

    async def run(pool: RewardPool) -> list[Episode]:
        gold = r"\frac{3}{8}"
        texts_then = [*texts, r"\boxed{\frac{3}{7}}", r"\boxed{\frac{3}{8}}"]
        return await asyncio.gather(*(pool.score(episode(0, text, gold)) for text in texts_then))

    with pool_of(MathReward()) as pool:
        assert [e.reward for e in asyncio.run(run(pool))] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert not marker.exists()


class SlowToLoad(Reward):
    def setup(self) -> None:
        time.sleep(1.0)

    def __call__(self, episode: Episode) -> float:
        return 1.0


def test_loading_the_reward_does_not_count_as_scoring_time() -> None:
    with RewardPool(SlowToLoad(), workers=1, timeout_s=0.5, memory_mb=64) as pool:
        (scored,) = score_all(pool, "")
    assert scored.reward == 1.0


class CannotLoad(Reward):
    def setup(self) -> None:
        raise FileNotFoundError("unit_tests.json")

    def __call__(self, episode: Episode) -> float:
        return 1.0


def test_reward_that_cannot_be_loaded_is_told_at_the_start_and_in_every_episode() -> None:
    with RewardPool(CannotLoad(), workers=2, timeout_s=1.0, memory_mb=64) as pool:
        with pytest.raises(PartFailed, match=r"FileNotFoundError: unit_tests\.json"):
            asyncio.run(pool.start())
        (failed,) = score_all(pool, "")
    assert "unit_tests.json" in str(failed.failure)


def test_worker_that_died_between_calls_is_replaced_without_a_failure() -> None:
    with pool_of(Act()) as pool:
        (first,) = score_all(pool, "")
        assert first.reward is not None
        os.kill(int(first.reward), signal.SIGKILL)
        assert wait_gone(int(first.reward))
        (second,) = score_all(pool, "")
    assert second.reward not in (None, first.reward)


def test_workers_ignore_the_keyboard() -> None:
    with pool_of(Act()) as pool:
        (first,) = score_all(pool, "")
        assert first.reward is not None
        os.kill(int(first.reward), signal.SIGINT)
        (second,) = score_all(pool, "")
    assert second.reward == first.reward


def test_close_ends_workers_and_their_children_and_fails_what_waits() -> None:
    with pool_of(Act(), timeout_s=600) as pool:
        worker, child = (int(e.reward or 0) for e in score_all(pool, "", "child"))
        threading.Timer(0.5, pool.close).start()
        begun = time.monotonic()
        scored = score_all(pool, "hang", "", "")
        assert time.monotonic() - begun < 5.0
    assert [e.failure for e in scored] == ["the reward pool was closed"] * 3
    assert wait_gone(worker, child)
    assert score_all(pool, "")[0].failure == "the reward pool was closed"


def test_limits_below_zero_and_uncopyable_rewards_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers = 0.*\n?.*timeout_s = -1"):
        RewardPool(Act(), workers=0, timeout_s=-1, memory_mb=64)
    locked = Act()
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="Act cannot be copied"):
        RewardPool(locked, workers=1, timeout_s=1, memory_mb=64)
    with pytest.raises(ConfigError, match="of type function"):
        RewardPool(is_gone, workers=1, timeout_s=1, memory_mb=64)  # type: ignore[arg-type]


SCRIPT = textwrap.dedent(
    """
    # run as `python -m`, with no guard around what it does at import
    import asyncio, os, sys, time
    from forge.reward import Reward, RewardPool
    from forge.types import Completion, Episode, FinishReason, Prompt

    print("imported", flush=True)

    class Pid(Reward):
        def __call__(self, episode):
            if episode.text == "hang":
                time.sleep(600)
            return float(os.getpid())

    def episode(text):
        done = Completion(token_ids=(), logprobs=(), versions=(), text=text, finish_reason=FinishReason.STOP)
        prompt = Prompt(id="a:1", question="", answer="", token_ids=())
        return Episode(prompt=prompt, completion=done, group=0, member=0)

    async def run():
        pool = RewardPool(Pid(), workers=2, timeout_s=600, memory_mb=64)
        await pool.start()
        both = await asyncio.gather(*(pool.score(episode("")) for _ in range(20)))
        print(*sorted({int(e.reward) for e in both}), flush=True)
        if sys.argv[1] == "hang":
            await asyncio.gather(*(pool.score(episode("hang")) for _ in range(2)))
        pool.close()

    asyncio.run(run())
    """
)


@pytest.mark.parametrize("end", ["normally", "hang"])
def test_no_worker_outlives_a_program_that_ends_or_is_killed(tmp_path: Path, end: str) -> None:
    (tmp_path / "program.py").write_text(SCRIPT)
    program = subprocess.Popen(
        [sys.executable, "-m", "program", end], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert program.stdout is not None
    with program, contextlib.closing(program.stdout) as output:
        assert output.readline() == "imported\n"
        pids = [int(pid) for pid in output.readline().split()]
        assert pids
        if end == "hang":
            assert not any(map(is_gone, pids))
            program.send_signal(signal.SIGKILL)
        assert program.wait(timeout=20) == (-signal.SIGKILL if end == "hang" else 0)
        assert wait_gone(*pids)
        assert output.read() == ""  # the workers did not run the program again
