"""The calibration actor's engine: an unquantized copy of a version, observed, and compared with its quantized form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forge.config import GrpoConfig
from forge.engine_titan import TitanTrainer, unscored
from forge.quant.calibration import Measurement, Observer, PolicyMeasurement, measure_layer
from forge.quant.grid import weight_codes, weight_scale
from forge.quant.smooth import smooth
from forge.types import ActivationScale, Episode


@dataclass(kw_only=True, slots=True, frozen=True)
class Verified:
    """What greedy decoding does where a draft is given: `agreed` tokens are the draft's, `token` comes after them."""

    agreed: int
    token: int | None
    """The policy's own token in place of the draft's next one; None when all of the draft agreed."""


class TitanCalibrator(TitanTrainer):
    """One rank that never trains. Its layers are prepared, and fake-quant is on only while the quantized policy is
    asked."""

    def __init__(self, config: GrpoConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._codes: dict[str, Tensor] = {}

    # ---- smoothing --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def smooth(self, rows: Sequence[Sequence[int]], target: Path, *, exponent: float) -> int:
        """Write the model, smoothed, as a Hugging Face folder (see forge.quant.smooth).

        Args:
            rows: token ids to observe.

        Returns:
            number of channels that got a factor.
        """
        from forge.engine_titan_files import save_tensors
        from forge.engine_titan_model import read_weights

        observers = self.observe(rows)
        largest = {n: o.largest for n, o in observers.items() if o.largest is not None}
        tensors = {n: t for n, t in read_weights(self.folder) if not n.endswith("rotary_emb.inv_freq")}
        moved = smooth(tensors, largest, exponent=exponent)
        save_tensors(tensors.items(), source=self.folder, target=target)
        return moved

    def tokenizer(self) -> Any:
        """The folder's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder)

    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a completion, as the rollout engine reads them from the folder."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            value = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
            found |= set(value if isinstance(value, list) else [] if value is None else [value])
        return tuple(sorted(found))

    # ---- observing --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the unquantized weights of a version, by Hugging Face name."""
        self.reshard()
        for name, parameter in self.published_parameters():
            parameter.to_local().copy_(tensors[self.hf_name(name)])

    @torch.no_grad()
    def observe(self, rows: Sequence[Sequence[int]]) -> dict[str, Observer]:
        """Observers of every layer's input over the rows, `calibration.batch_size` rows a pass, unquantized."""
        c = self.config.calibration
        observers = {name: Observer() for name in self.prepared}
        self.fake_quant(False)
        with self._hooked(observers):
            for start in range(0, min(len(rows), c.batch_size * c.iterations), c.batch_size):
                self.logits([unscored(r, i) for i, r in enumerate(rows[start : start + c.batch_size])])
        return observers

    @contextmanager
    def _hooked(self, observers: Mapping[str, Observer]) -> Iterator[None]:
        def watch(observer: Observer) -> Callable[[Any, Any], None]:
            return lambda _, args: observer.update(args[0].to(self.served))

        handles = [self.prepared[n].register_forward_pre_hook(watch(o)) for n, o in observers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def measure(
        self,
        rows: Sequence[Sequence[int]],
        more: Sequence[Sequence[int]],
        live: Mapping[str, ActivationScale],
    ) -> Measurement:
        """Observe rows and propose scales.

        Args:
            rows: token ids of fresh rollouts; those shorter than `calibration.min_tokens` are refused and counted.
            more: a second sample, observed as well when the first shows outliers.
            live: scales to compare with.
        """
        assert self.quantization is not None
        c = self.config.calibration
        usable = [r for r in rows if len(r) >= c.min_tokens][: c.samples]
        refused = sum(len(r) < c.min_tokens for r in rows)
        observers = self.observe(usable)
        spare = [r for r in more if len(r) >= c.min_tokens][: c.samples]
        wide = any(o.high - o.low > c.outlier_std * o.std for o in observers.values())
        resampled = wide and bool(spare)
        if resampled:
            for name, again in self.observe(spare).items():
                observers[name].merge(again)
            usable += spare
        static = self.quantization.scheme.static
        layers, scales = [], {}
        for name, observer in observers.items():
            layer, scale = measure_layer(
                name,
                observer,
                live=live.get(name),
                static=static,
                changed_codes_share=self._changed_codes(name),
            )
            layers.append(layer)
            if scale is not None:
                scales[name] = scale
        return Measurement(
            rows=len(usable),
            tokens=sum(map(len, usable)),
            rows_refused=refused,
            resampled=resampled,
            layers=tuple(layers),
            scales=scales,
        )

    def _changed_codes(self, name: str) -> float:
        assert self.quantization is not None
        weight = self.prepared[name].weight
        local = getattr(weight, "_local_tensor", weight)
        codes = weight_codes(local, weight_scale(local, self.quantization, served=self.served), self.quantization)
        before = self._codes.get(name)
        self._codes[name] = codes
        return 1.0 if before is None else float((codes.float() != before.float()).float().mean())

    # ---- comparing --------------------------------------------------------------------------------------------

    @contextmanager
    def policy(self, scales: Mapping[str, ActivationScale] | None) -> Iterator[None]:
        """Compute as the quantized policy with these scales; None: as the unquantized one."""
        self.fake_quant(scales is not None)
        self.set_scales(scales or {})
        try:
            yield
        finally:
            self.fake_quant(False)

    @torch.no_grad()
    def verify(self, episodes: Sequence[Episode], scales: Mapping[str, ActivationScale] | None) -> list[Verified]:
        """How far the greedy policy agrees with drafts: one forward pass in place of one for every token.

        Args:
            episodes: prompts with drafted completions, each of at least one token.
            scales: of the quantized policy; None asks the unquantized one.
        """
        found: list[Verified] = []
        with self.policy(scales):
            for batch in self._batches(episodes):
                p, logits = self.logits(batch)
                best = logits.argmax(-1)
                for i, e in enumerate(batch):
                    mine = best[p.episode == i].tolist()
                    drafted = e.completion.token_ids
                    agreed = next((k for k, (a, b) in enumerate(zip(mine, drafted, strict=True)) if a != b), None)
                    found.append(
                        Verified(agreed=len(drafted), token=None)
                        if agreed is None
                        else Verified(agreed=agreed, token=mine[agreed])
                    )
        return found

    def score_as(
        self, sequences: Sequence[Sequence[int]], scales: Mapping[str, ActivationScale] | None
    ) -> list[list[float]]:
        """`score` by one of the two policies.

        Args:
            scales: of the quantized policy; None: the unquantized one.
        """
        with self.policy(scales):
            return self.score(sequences, batch_size=self.config.calibration.batch_size)

    @torch.no_grad()
    def compare(
        self,
        episodes: Sequence[Episode],
        proposed: Mapping[str, ActivationScale],
        live: Mapping[str, ActivationScale] | None,
    ) -> PolicyMeasurement:
        """Quantized against unquantized policy on the tokens of given episodes.

        Args:
            live: scales that are live, where they differ from the proposed ones; None compares only the proposed.
        """
        sums = {"kl": 0.0, "gap": 0.0, "live_kl": 0.0, "live_gap": 0.0, "agree": 0.0, "tokens": 0.0}
        for batch in self._batches(episodes):
            p, logits = self.logits(batch)
            true = torch.log_softmax(logits.float(), -1)
            sums["tokens"] += len(p.target)
            for prefix, scales in (("", proposed), ("live_", live)):
                if scales is None:
                    continue
                with self.policy(scales):
                    other = torch.log_softmax(self.logits(batch)[1].float(), -1)
                sums[f"{prefix}kl"] += float((true.exp() * (true - other)).sum())
                difference = (true - other).gather(-1, p.target[:, None])
                sums[f"{prefix}gap"] += float(difference.abs().sum())
                if not prefix:
                    sums["agree"] += float((true.argmax(-1) == other.argmax(-1)).sum())
        n = sums["tokens"]
        if n == 0:
            return PolicyMeasurement()
        return PolicyMeasurement(
            kl=sums["kl"] / n,
            logprob_gap=sums["gap"] / n,
            live_kl=sums["live_kl"] / n if live is not None else sums["kl"] / n,
            live_logprob_gap=sums["live_gap"] / n if live is not None else sums["gap"] / n,
            argmax_agreement=sums["agree"] / n,
        )

    def _batches(self, episodes: Sequence[Episode]) -> Iterator[Sequence[Episode]]:
        size = self.config.calibration.batch_size
        return (episodes[i : i + size] for i in range(0, len(episodes), size))
