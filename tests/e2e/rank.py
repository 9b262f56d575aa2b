"""One rank of a trainer, as a process: `python rank.py RANK JOB`. Rank 0 writes what each action gave as JSON."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from forge.advantage import with_advantages
from forge.config import load_config
from forge.engine_titan import TitanTrainer, init_process
from forge.errors import RefusedInput
from forge.quant import Format
from forge.types import Completion, Episode, FinishReason, Group, Prompt


def groups(vocab: int, *, num_groups: int = 3, size: int = 4, logprob: float = -6.0, share: bool = True) -> list[Group]:
    """Groups of made-up tokens with lengths that differ; `share=False` puts every episode in a group of its own."""
    made = []
    for g in range(num_groups):
        prompt = Prompt(
            id=f"p{g}", question="", answer="", token_ids=tuple((7 * g + 3 * i) % vocab for i in range(4 + 3 * g))
        )
        episodes = []
        for m in range(size):
            n = 2 + 2 * m
            completion = Completion(
                token_ids=tuple((11 * g + 5 * m + 13 * i + 1) % vocab for i in range(n)),
                logprobs=(logprob,) * n,
                versions=(0,) * n,
                text="",
                finish_reason=FinishReason.STOP,
            )
            episodes.append(
                Episode(prompt=prompt, completion=completion, group=g, member=m, reward=float(m == g % size))
            )
        made.append(with_advantages(Group(index=g, episodes=tuple(episodes)), scale_by_std=True, keep_equal=False))
    if not share:
        from dataclasses import replace

        made = [
            Group(index=100 * g.index + e.member, episodes=(replace(e, group=100 * g.index + e.member),))
            for g in made
            for e in g.episodes
        ]
    return made


def main() -> None:
    rank, job = int(sys.argv[1]), json.loads(sys.argv[2])
    init_process(rank, job["ranks"], job["rendezvous"], on_cpu=True, threads=1)

    def build(overrides: list[str], model: str) -> TitanTrainer:
        config = load_config("grpo", [f"trainer.ranks={job['ranks']}", *overrides])
        return TitanTrainer(config, Path(model))

    from forge import engine_titan_files as files  # imports titan, which must know the device first

    trainer = build(job["overrides"], job["model"])
    vocab = trainer.model.config.vocab_size
    results: list[Any] = []
    for action in job["actions"]:
        kind = action.pop("do")
        if kind == "build":  # start anew in the same process: importing titan is what takes time
            trainer = build(action["overrides"], action.get("model", job["model"]))
            vocab = trainer.model.config.vocab_size
        elif kind == "step":
            stats = trainer.step(groups(vocab, **action))
            results.append(dict(stats.metrics))
        elif kind == "logprobs":
            found = trainer.logprobs([e for g in groups(vocab, **action) for e in g.episodes])
            results.append([[g, m, list(values)] for (g, m), values in sorted(found.items())])
        elif kind == "weights":
            total = [float(p.full_tensor().double().abs().sum()) for p in trainer.model.parameters()]
            results.append(math.fsum(total))
        elif kind == "stage":
            published = trainer.stage()
            results.append([published.changed, published.total, sorted(published.shards)])
        elif kind == "save_quantized":
            poison = action.get("poison")
            if poison:
                with torch.no_grad():
                    parameter = dict(trainer.model.named_parameters())[poison].to_local()
                    if rank == job["ranks"] - 1:
                        parameter[-1, 0] = math.nan
            try:
                rows = files.save_quantized(trainer, Path(action["path"]), Format(action["format"]), {})
                results.append(len(rows))
            except RefusedInput as error:
                results.append(str(error))
        elif kind == "listening":
            connections = psutil.Process().net_connections(kind="inet")
            results.append(sorted({c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}))
        elif kind == "save_state":
            files.write_snapshot(files.snapshot(trainer), Path(action["path"]))
            results.append(trainer.version)
        elif kind in ("save_hf", "load_state"):
            getattr(files, kind)(trainer, Path(action["path"]))
            results.append(trainer.version)
        else:
            raise ValueError(kind)
    if rank == 0:
        Path(job["result"]).write_text(json.dumps(results))


main()
