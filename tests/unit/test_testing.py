"""The fakes keep the protocols of the loop."""

from forge.loop import Learner, Prompts, Rollouts, Scorer
from forge.testing import FakeLearner, FakePrompts, FakeRollouts, FakeScorer, fake_group


async def test_the_fakes_are_what_the_loop_asks_for() -> None:
    prompts: Prompts = FakePrompts()
    rollouts: Rollouts = FakeRollouts(version=2)
    scorer: Scorer = FakeScorer()
    learner: Learner = FakeLearner()
    assert prompts.prompt(3).question == "q3"
    assert (await rollouts.statistics())["tokens"] == 0
    scored = await scorer.score(fake_group(0, [0, 0]).episodes)
    assert [e.reward for e in scored] == [0.0, 1.0]
    assert (await learner.step([])).version == 1
