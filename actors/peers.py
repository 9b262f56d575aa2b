"""Peers and limits that benchmarks compare with, each as its makers would run it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from forge import weights
from forge.actors.base import ForgeActor
from forge.actors.trainer import Trainer
from forge.batch import pack
from forge.config import Device, GrpoConfig
from forge.mesh import concurrent_endpoint
from forge.types import Episode, Group, Manifest, SamplingRequest


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


class PlainHuggingFace(ForgeActor):
    """A transformers model in float32 with torch's own AdamW, computing the policy gradient of the same episodes.

    Args:
        config: the run's configuration.
        folder: model folder.
    """

    def __init__(self, config: GrpoConfig, folder: Path) -> None:
        self.config, self.folder = config, folder

    @concurrent_endpoint
    async def setup(self) -> None:
        await asyncio.to_thread(self._setup)

    def _setup(self) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(self.config.trainer.threads or os.cpu_count() or 1)
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.config.trainer.lr, fused=True)

    @concurrent_endpoint
    async def forward_backward(self, groups: Sequence[Group], padded: bool) -> float:
        """Seconds of all forward and backward passes of a step; the optimizer's step follows and is not counted.

        Args:
            padded: each completion with its own prompt in a row of a padded batch; otherwise the packs that Forge
                computes, one sequence under a mask.
        """
        return await asyncio.to_thread(self._forward_backward, groups, padded)

    def _forward_backward(self, groups: Sequence[Group], padded: bool) -> float:
        episodes = [e for g in groups for e in g.episodes]
        tokens = sum(e.num_response_tokens for e in episodes)
        start = time.perf_counter()
        for i in range(0, len(episodes), self.config.trainer.micro_batch):
            batch = episodes[i : i + self.config.trainer.micro_batch]
            (self._padded(batch) if padded else self._packed(batch)).div(-tokens).backward()
        seconds = time.perf_counter() - start
        self.optimizer.step()
        self.optimizer.zero_grad()
        return seconds

    def _packed(self, episodes: Sequence[Episode]) -> torch.Tensor:
        p = pack(episodes)
        mask = torch.full((len(p.token_ids), len(p.token_ids)), -torch.inf)
        for begin, end in p.blocks():
            mask[begin:end, begin:end].masked_fill_(p.visible(begin, end), 0.0)
        logits = self.model(
            input_ids=p.token_ids[None], position_ids=p.positions[None], attention_mask=mask[None, None]
        ).logits[0]
        logprobs = logits.log_softmax(-1)[p.source].gather(-1, p.target[:, None]).squeeze(-1)
        return (logprobs * p.advantages).sum()

    def _padded(self, episodes: Sequence[Episode]) -> torch.Tensor:
        rows = [torch.tensor(e.prompt.token_ids + e.completion.token_ids) for e in episodes]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        index = torch.arange(ids.shape[1])
        length = torch.tensor([len(r) for r in rows])[:, None]
        prompt = torch.tensor([len(e.prompt.token_ids) for e in episodes])[:, None]
        logits = self.model(input_ids=ids, attention_mask=(index < length).long()).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        trained = (index >= prompt) & (index < length)
        advantage = torch.tensor([e.advantage for e in episodes])[:, None]
        return (logprobs * trained[:, 1:] * advantage).sum()


class StateDictTrainer(Trainer):
    """A trainer that can also publish by `torchstore.put_state_dict`."""

    @concurrent_endpoint
    async def put_state_dict(self, key: str) -> None:
        """Put this rank's staged shards under a key."""
        import torchstore

        await torchstore.put_state_dict(self.staged[""], key, store_name=self.store)


class WeightReader(ForgeActor):
    """Reads versions and does nothing with them.

    Args:
        store: name of the weight store.
    """

    def __init__(self, store: str) -> None:
        self.store = store

    @concurrent_endpoint
    async def read(self, manifest: Manifest) -> None:
        """Map a version, or fetch it in messages, and check its digests."""
        async with weights.reading(self.store, manifest):
            pass

    @concurrent_endpoint
    async def get_state_dict(self, key: str) -> None:
        """`torchstore.get_state_dict`."""
        import torchstore

        await torchstore.get_state_dict(key, store_name=self.store)

    @concurrent_endpoint
    async def delete(self, prefix: str) -> None:
        """Delete all keys that begin so."""
        import torchstore

        client = await torchstore.client(self.store)
        for key in await client.keys(prefix):
            await client.delete(key)

    @concurrent_endpoint
    async def memcpy(self, num_bytes: int) -> float:
        """Seconds that copying so many bytes takes within warm memory."""
        source = torch.zeros(num_bytes, dtype=torch.uint8)
        target = source.clone()
        target.copy_(source)
        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start
