"""Train a model to be brief, with a reward of your own: `python examples/short.py`."""

import asyncio
import sys

from forge import Episode, Reward, launch, load_config


class Short(Reward):
    """More reward for fewer tokens."""

    def __call__(self, episode: Episode) -> float:
        return 1.0 / (1 + episode.num_response_tokens)


async def main(overrides: list[str]) -> None:
    config = load_config("grpo", ["model=smollm2", "placement=cpu", "steps=20", *overrides])
    async with launch(config, reward=Short()) as run:
        async for step in run.train():
            print(step.version, step.metrics["reward/mean"])
            if step.step == 5:
                await run.set(max_age=2)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
