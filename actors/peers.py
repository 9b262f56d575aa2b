"""Peers that benchmarks compare with, each as its makers would run it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from forge.actors.base import ForgeActor
from forge.config import Device, GrpoConfig
from forge.mesh import concurrent_endpoint
from forge.types import SamplingRequest


class PlainVllm(ForgeActor):
    """`vllm.LLM.generate` on a list of prompts, with the engine in this process as Forge has it."""

    def __init__(self, config: GrpoConfig, folder: Path) -> None:
        self.config, self.folder = config, folder

    @concurrent_endpoint
    async def setup(self) -> None:
        await asyncio.to_thread(self._setup)

    def _setup(self) -> None:
        from vllm import LLM

        on_cpu = self.config.placement.device is Device.cpu
        self.llm = LLM(
            str(self.folder),
            dtype=self.config.generator.dtype.value,
            max_model_len=self.config.model.max_len,
            max_num_seqs=self.config.generator.max_running,
            enforce_eager=on_cpu,
            seed=self.config.seed,
        )

    @concurrent_endpoint
    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of every token of each sequence but the first."""
        return await asyncio.to_thread(self._score, sequences)

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(s)) for s in sequences],
            SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
        return [
            [entry[token].logprob for token, entry in zip(s[1:], o.prompt_logprobs[1:], strict=True)]
            for s, o in zip(sequences, outputs, strict=True)
        ]

    @concurrent_endpoint
    async def tokens_per_second(self, requests: Sequence[SamplingRequest]) -> float:
        """Sample once; returns sampled tokens over seconds, measured in this process."""
        return await asyncio.to_thread(self._measure, requests)

    def _measure(self, requests: Sequence[SamplingRequest]) -> float:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=list(r.token_ids)) for r in requests]
        params = [
            SamplingParams(temperature=r.temperature, max_tokens=r.max_new_tokens, seed=r.seed, ignore_eos=True)
            for r in requests
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start)
