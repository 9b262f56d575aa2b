"""From rows to prompts: chat template, tokens, what is held out, and the order of training.

    load_rows -> Rows -> build_dataset -> Dataset -> prompt(0), prompt(1), …

The order needs no state but an index: `Dataset.prompt(i)` is a function of the seed and i alone.
Text of a dataset never becomes control tokens: a question that contains "<|im_end|>" is read as those characters.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge.errors import DataError, ModelFolderError
from forge.rows import Row, Rows, SkippedRow, listing, load_rows
from forge.types import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forge.config import DataConfig

__all__ = ["Dataset", "Row", "Rows", "SkippedRow", "build_dataset", "load_rows"]

log = logging.getLogger(__name__)

Tokenizer = Any
"""A fast tokenizer of transformers, as AutoTokenizer returns it; transformers is not imported here."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Dataset:
    """Tokenized prompts: those trained on and those held out.

    Example: with 14 training prompts, prompt(0) to prompt(13) is one epoch, each row once; prompt(14) starts the
    second in another order.
    """

    prompts: tuple[Prompt, ...]
    """Training prompts, in the order of the source."""
    heldout: tuple[Prompt, ...]
    """Prompts for evaluation, in the order of the source; no training prompt asks the same question."""
    skipped: tuple[SkippedRow, ...]
    """Rows that are not used, and why."""
    seed: int
    """Seed of the order."""

    def __len__(self) -> int:
        """Number of training prompts: the length of an epoch."""
        return len(self.prompts)

    def prompt(self, index: int) -> Prompt:
        """The index-th prompt of training, from 0 and without end; each epoch has its own order.

        Raises:
            IndexError: index below 0.
        """
        if index < 0:
            raise IndexError(f"a prompt's index must be 0 or more, got {index}")
        epoch, place = divmod(index, len(self.prompts))
        return self.prompts[_epoch_order(self.seed, epoch, len(self.prompts))[place]]


def build_dataset(
    rows: Rows,
    tokenizer: Tokenizer,
    config: DataConfig,
    *,
    seed: int,
    max_prompt_tokens: int,
    prompts_per_step: int = 1,
) -> Dataset:
    """Render and tokenize every row, leave out those without room, set the held-out rows aside.

    Args:
        rows: what `load_rows` returned.
        tokenizer: a fast tokenizer of transformers.
        config: the data section.
        seed: seed of the training order; the choice of held-out rows does not depend on it.
        max_prompt_tokens: longest prompt, template included, that leaves room for an answer.
        prompts_per_step: prompts a training step takes; fewer training rows are refused.

    Raises:
        ModelFolderError: the tokenizer has no chat template, or one that cannot be used.
        DataError: no usable row, none that can be held out, or fewer training rows than a step takes.
    """
    renderer = _Renderer(tokenizer, config)
    prompts: list[Prompt] = []
    skipped: list[SkippedRow] = []
    for row in rows.rows:
        try:
            token_ids = renderer.encode(row.question)
        except _Unrenderable as error:
            skipped.append(SkippedRow(id=row.id, reason=str(error)))
            continue
        if len(token_ids) > max_prompt_tokens:
            reason = f"{len(token_ids)} tokens, more than {max_prompt_tokens} leave no room for an answer"
            skipped.append(SkippedRow(id=row.id, reason=reason))
            continue
        prompts.append(_prompt(row, token_ids))
    if skipped:
        log.warning("%s: %d of %d rows skipped: %s", rows.source, len(skipped), len(rows.rows), listing(skipped))
    if not prompts:
        raise DataError(
            f"{rows.source}: none of its {len(rows.rows)} rows is usable; {skipped[0].id}: {skipped[0].reason}"
            if skipped
            else f"{rows.source} holds no rows"
        )
    asked = min(100, len(prompts) // 10) if config.heldout is None else config.heldout
    chosen = _choose_heldout(prompts, asked)
    training = tuple(p for i, p in enumerate(prompts) if i not in chosen)
    heldout = tuple(p for i, p in enumerate(prompts) if i in chosen)
    _check_counts(rows.source, config.heldout or 0, len(training), len(heldout), prompts_per_step)
    return Dataset(prompts=training, heldout=heldout, skipped=rows.skipped + tuple(skipped), seed=seed)


def _prompt(row: Row, token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(id=row.id, question=row.question, answer=row.answer, token_ids=token_ids, fields=row.fields)


def _check_counts(source: str, asked: int, training: int, heldout: int, prompts_per_step: int) -> None:
    usable = training + heldout
    if training < prompts_per_step:
        fixes = [f"prompts_per_step to at most {training}"] if training else []
        if heldout and usable >= prompts_per_step:
            fixes.insert(0, f"data.heldout to at most {usable - prompts_per_step}")
        fix = f"set {' or '.join(fixes)}, or add rows" if fixes else "add rows"
        raise DataError(
            f"{source}: {training} rows to train on ({usable} usable, {heldout} of them held out) are fewer than "
            f"the {prompts_per_step} prompts of a step: {fix}"
        )
    if asked and not heldout:
        raise DataError(
            f"{source}: no row can be held out, since more than {asked} rows ask each question: "
            "raise data.heldout, or set it to 0 to do without evaluation"
        )
    if heldout < asked:
        log.warning("%s: %d rows are held out, not %d: rows of one question stay together", source, heldout, asked)


# what is held out, and the order ---------------------------------------------------------------------------------


def _choose_heldout(prompts: Sequence[Prompt], count: int) -> set[int]:
    """Places of up to `count` prompts. All rows that ask the same question go together, so that none of them is
    trained; which questions go depends on their text alone, so that runs with other seeds or more rows compare."""
    asking: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        asking.setdefault(" ".join(prompt.question.split()), []).append(i)
    chosen: set[int] = set()
    for question in sorted(asking, key=lambda q: hashlib.sha256(q.encode()).digest()):
        if len(chosen) + len(asking[question]) <= count:
            chosen.update(asking[question])
    return chosen


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, length: int) -> tuple[int, ...]:
    """A permutation of range(length). Fisher-Yates over `random()`, whose stream Python promises to keep."""
    source = random.Random(f"forge data order {seed} {epoch}")
    order = list(range(length))
    for i in range(length - 1, 0, -1):
        j = int(source.random() * (i + 1))
        order[i], order[j] = order[j], order[i]
    return tuple(order)


# rendering and tokens --------------------------------------------------------------------------------------------

_MARK = "\ue000\ue001\ue002"
"""Stands in for the question while a template is taken apart: private-use characters, which have no case and are no
space, so that a template leaves them as they are."""
_SAMPLE = "What is 41 + 27?\n  Say  it."
"""Ordinary text, to prove that a text tokenized in pieces gives the same ids as in one."""


class _Unrenderable(ValueError):
    """Why a question cannot be put into the prompt faithfully."""


class _Renderer:
    """Questions to token ids, for one tokenizer and one data section.

    The rendered prompt is tokenized as one string, without the tokenizer's own special tokens, since the template
    has written what it needs. When that reads other control tokens than the template's own, the question holds some:
    then only the template's are kept, and the text between them is tokenized with control tokens unknown.
    """

    def __init__(self, tokenizer: Tokenizer, config: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.folder = getattr(tokenizer, "name_or_path", "") or "the model folder"
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelFolderError(f"{self.folder}: the tokenizer is not a fast one: add its tokenizer.json")
        self.definition: dict[str, Any] = json.loads(backend.to_str())
        self.definition.update(truncation=None, padding=None)  # as saved by whoever trained the model
        self.full = _tokenizer(self.definition)
        self.control = {token["id"] for token in self.definition.get("added_tokens") or [] if token["content"].strip()}
        self.prefix = self._prefix()
        self.pieces = self._render(_MARK).split(_MARK)
        if len(self.pieces) < 2:
            raise ModelFolderError(f"{self.folder}: the chat template leaves out the user's message")
        self.own_control = self._control(self._read(self._render(_SAMPLE)))

    def encode(self, question: str) -> tuple[int, ...]:
        """Token ids of the prompt that asks a question."""
        text = self._render(question)
        token_ids = self._read(text)
        if self._control(token_ids) != self.own_control:
            token_ids = self._read_in_pieces(self._parts(question, text), question)
        return (*self.prefix, *token_ids)

    def _prefix(self) -> tuple[int, ...]:
        """The BOS of a plain-text prompt, where the tokenizer adds one; a template writes its own."""
        if not self.config.plain_text:
            if not getattr(self.tokenizer, "chat_template", None):
                raise ModelFolderError(
                    f"{self.folder}: no chat template: chat_template.jinja is missing and tokenizer_config.json has "
                    "none; add one, or set data.plain_text=true for a base model"
                )
            return ()
        if self.config.system is not None:
            raise DataError("data.system has no place in plain text: set data.system=null or data.plain_text=false")
        bos = getattr(self.tokenizer, "bos_token_id", None)
        added = self.full.encode("", add_special_tokens=True).ids
        return (bos,) if bos is not None and added[:1] == [bos] else ()

    def _render(self, question: str) -> str:
        message = self.config.template.replace("{question}", question)
        if self.config.plain_text:
            return message
        messages = [{"role": "user", "content": message}]
        if self.config.system is not None:
            messages.insert(0, {"role": "system", "content": self.config.system})
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever the template's own code raises
            said = " ".join(str(error).split()) or type(error).__name__
            hint = "; if it knows no system message, set data.system=null" if self.config.system is not None else ""
            raise ModelFolderError(f"{self.folder}: the chat template refuses the prompt: {said}{hint}") from error
        assert isinstance(text, str)
        return text

    def _read(self, text: str) -> list[int]:
        ids: list[int] = self.full.encode(text, add_special_tokens=False).ids
        return ids

    def _control(self, token_ids: Iterable[int]) -> list[int]:
        return [i for i in token_ids if i in self.control]

    def _parts(self, question: str, text: str) -> list[str]:
        """The rendered text as template, question, template …, with the question as the template wrote it."""
        for written in (question, question.strip(), question.lstrip(), question.rstrip()):
            if written.join(self.pieces) == text:
                return [p for piece in self.pieces for p in (piece, written)][:-1]
        raise _Unrenderable("the question holds control tokens, and the chat template rewrites it")

    def _read_in_pieces(self, parts: Sequence[str], question: str) -> list[int]:
        if not self._pieces_agree:
            raise _Unrenderable(f"the question holds control tokens ({self._named(question)}), and this tokenizer "
                                "cannot write them as text")  # fmt: skip
        return self._join(parts)

    def _join(self, parts: Sequence[str]) -> list[int]:
        """Ids of template (even places) and question (odd places), control tokens from the template alone."""
        ids: list[int] = []
        text = ""
        for i, part in enumerate(parts):
            end = 0
            if i % 2 == 0:
                encoding = self.full.encode(part, add_special_tokens=False)
                for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
                    if token in self.control:
                        ids += [*self._plain_ids(text + part[end:start]), token]
                        text, end = "", stop
            text += part[end:]
        return ids + self._plain_ids(text)

    def _plain_ids(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if self._control(ids):
            raise _Unrenderable("the question holds control tokens, and this tokenizer cannot write them as text")
        return ids

    @functools.cached_property
    def _plain(self) -> Any:
        """The same tokenizer, to which control tokens are ordinary characters."""
        kept = [t for t in self.definition.get("added_tokens") or [] if t["id"] not in self.control]
        return _tokenizer({**self.definition, "added_tokens": kept, "post_processor": None})

    @functools.cached_property
    def _pieces_agree(self) -> bool:
        text = self._render(_SAMPLE)
        return self._join(self._parts(_SAMPLE, text)) == self._read(text)

    def _named(self, question: str) -> str:
        found = Counter(t["content"] for t in self.definition.get("added_tokens") or [] if t["content"] in question)
        return ", ".join(found) or "in disguise"


def _tokenizer(definition: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer as Backend

    return Backend.from_str(json.dumps(definition))
