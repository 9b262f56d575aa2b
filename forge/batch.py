"""Packing: groups of episodes become the flat tensors of a forward pass.

Shapes: T packed tokens, N trained tokens (each predicted from one of the T hidden states).

A pack holds, one after the other, for each group in it: the prompt once, then its completions. A completion token
sees its own group's prompt and the earlier tokens of its own completion, so every log-prob equals the one of the
unpacked sequence, while the shared prompt is computed once:

    token      p0 p1 p2 | a0 a1 | b0 b1 b2        position   0 1 2 | 3 4 | 3 4 5
    member     -1 -1 -1 |  0  0 |  1  1  1        a0 and b0 are both predicted from the hidden state of p2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge.types import Episode, Group

PROMPT = -1
"""Member number of prompt tokens, which every completion of their group sees."""


@dataclass(kw_only=True, slots=True)
class Pack:
    """The tensors of one forward and backward pass of one rank."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T], position within the unpacked sequence."""
    groups: Tensor
    """int64 [T], which group a token belongs to, ascending."""
    members: Tensor
    """int64 [T], which completion of the group, PROMPT for prompt tokens."""
    source: Tensor
    """int64 [N], index into T of the hidden state that predicts each trained token."""
    target: Tensor
    """int64 [N], the sampled token ids."""
    sampler_logprobs: Tensor
    """float32 [N]."""
    reference_logprobs: Tensor
    """float32 [N], zeros without KL."""
    advantages: Tensor
    """float32 [N]."""
    episode: Tensor
    """int64 [N], index into the episodes the pack was built from."""

    def to(self, device: torch.device) -> Pack:
        """The same pack on another device."""
        return Pack(**{name: getattr(self, name).to(device, non_blocking=True) for name in self.__slots__})

    def blocks(self) -> list[tuple[int, int]]:
        """[start, stop) of each group, the blocks of the block-diagonal attention mask."""
        counts = torch.unique_consecutive(self.groups, return_counts=True)[1].tolist()
        stops = torch.tensor(counts).cumsum(0).tolist()
        return [(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]

    def visible(self, start: int, stop: int) -> Tensor:
        """bool [L, L] for a block: may query i see key j?"""
        members = self.members[start:stop]
        index = torch.arange(stop - start, device=members.device)
        earlier = index[:, None] >= index[None, :]
        return earlier & ((members[None, :] == PROMPT) | (members[None, :] == members[:, None]))


def trained_episodes(groups: Sequence[Group], *, mask_truncated: bool) -> list[Episode]:
    """The episodes that carry a loss, in order.

    Left out: dropped groups, episodes that failed scoring or sampled nothing and, with `mask_truncated`, those that
    a length limit cut off.
    """
    return [
        e
        for g in groups
        if g.dropped is None
        for e in g.episodes
        if e.failure is None and e.num_response_tokens > 0 and not (mask_truncated and e.truncated)
    ]


def trained_tokens(episodes: Sequence[Episode]) -> int:
    """Number of tokens with a loss: the global denominator, known before any forward pass."""
    return sum(sum(map(math.isfinite, e.completion.logprobs)) for e in episodes)


def split(episodes: Sequence[Episode], *, ranks: int, micro_batch: int) -> list[list[list[Episode]]]:
    """Micro-batches of each rank: `[rank][round]` is a list of episodes, maybe empty.

    Every rank gets the same number of rounds, since FSDP's collectives need all of them in each. Neighbouring
    episodes stay together, so that completions of one group share their prompt; rounds pair micro-batches of
    similar length, so that ranks wait little for each other.
    """
    if not episodes:
        return [[] for _ in range(ranks)]
    size = min(micro_batch, math.ceil(len(episodes) / ranks))
    micro = [list(episodes[i : i + size]) for i in range(0, len(episodes), size)]
    micro += [[] for _ in range(-len(micro) % ranks)]
    micro.sort(key=lambda m: sum(e.num_response_tokens + len(e.prompt.token_ids) for e in m), reverse=True)
    return [micro[rank::ranks] for rank in range(ranks)]


def pack(episodes: Sequence[Episode]) -> Pack:
    """Pack episodes. Neighbours of the same group share one copy of their prompt.

    Tokens whose sampler log-prob is missing (not finite) are fed but not trained. No episodes give a pack of one
    token and no trained one, with which a rank takes part in collectives.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    groups: list[int] = []
    members: list[int] = []
    source: list[int] = []
    target: list[int] = []
    sampler: list[float] = []
    reference: list[float] = []
    advantages: list[float] = []
    episode_of: list[int] = []
    block, last_group, prompt_end = -1, None, 0
    for i, e in enumerate(episodes):
        prompt, completion = e.prompt.token_ids, e.completion
        if e.group != last_group:
            block, last_group = block + 1, e.group
            token_ids += prompt
            positions += range(len(prompt))
            groups += [block] * len(prompt)
            members += [PROMPT] * len(prompt)
            prompt_end = len(token_ids) - 1
        first = len(token_ids)
        # The last token predicts nothing that was sampled, so it is never fed.
        fed = completion.token_ids[:-1]
        token_ids += fed
        positions += range(len(prompt), len(prompt) + len(fed))
        groups += [block] * len(fed)
        members += [i] * len(fed)
        references = e.reference_logprobs or (0.0,) * len(completion.token_ids)
        for k, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            if not math.isfinite(logprob):
                continue
            source.append(prompt_end if k == 0 else first + k - 1)
            target.append(token)
            sampler.append(logprob)
            reference.append(references[k])
            advantages.append(e.advantage)
            episode_of.append(i)
    if not token_ids:
        token_ids, positions, groups, members = [0], [0], [0], [PROMPT]
    return Pack(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        groups=torch.tensor(groups, dtype=torch.int64),
        members=torch.tensor(members, dtype=torch.int64),
        source=torch.tensor(source, dtype=torch.int64),
        target=torch.tensor(target, dtype=torch.int64),
        sampler_logprobs=torch.tensor(sampler, dtype=torch.float32),
        reference_logprobs=torch.tensor(reference, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        episode=torch.tensor(episode_of, dtype=torch.int64),
    )
