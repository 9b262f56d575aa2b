"""What a run is given: checked as a whole, before any process is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge import checkpoint
from forge.config import GrpoConfig, QuantConfig
from forge.data import Dataset, Row, Rows, SkippedRow, build_dataset, load_rows
from forge.errors import DataError, ModelFolderError
from forge.fetch import MODELS, fetch
from forge.model_folder import check_model_folder, read_header, weight_map
from forge.quant.scheme import Plan, Quantization
from forge.reward import Reward, build_reward, code_problem, gold_problem, gym_problem

GRADABLE: dict[str, Callable[[Row], str | None]] = {
    "math": lambda row: gold_problem(row.answer),
    "code": lambda row: code_problem(row.answer),
    "gym": lambda row: gym_problem(row.fields),
}
"""Why a reward cannot grade a row, for the rewards that can tell beforehand."""
LISTED_ROWS = 20
"""Bad rows that a refusal lists."""


def check_inputs(
    config: GrpoConfig, reward: Reward | None, *, graded: bool = True
) -> tuple[Path, Dataset, Path | None]:
    """Check model folder, data, reward and checkpoint, cheapest first, and return what the run starts from.

    Args:
        reward: a reward of the user's own; None builds the one that `config.reward.name` names.
        graded: whether completions are rewarded at all; otherwise answers are not looked at.

    Returns:
        the model folder, the tokenized dataset, and the checkpoint to resume from, if any.

    Raises:
        RefusedInput: what cannot work, before any process is started.
    """
    graded = graded and reward is None
    if graded:
        build_reward(config.reward.name)
    resume: Path | None = None
    if config.resume == "auto":
        assert config.name is not None
        resume = checkpoint.Checkpoints(Path(config.out) / "grpo" / config.name / "checkpoints", keep=1).latest()
    elif config.resume != "never":
        resume = Path(config.resume)
    if resume is not None:
        checkpoint.check_resumable(
            checkpoint.read_state(resume),
            seed=config.seed,
            prompts_per_step=config.prompts_per_step,
            steps=config.steps,
        )
    if config.model.path is not None:
        check_model_folder(Path(config.model.path))
    elif config.model.name not in MODELS and config.model.hub_id is not None:
        raise ModelFolderError(
            f"model={config.model.name} needs a local folder: download {config.model.hub_id} from the Hugging Face Hub "
            "and give model.path=FOLDER"
        )
    compares = graded and config.reward.name in ("math", "exact", "code")
    rows = load_rows(config.data, seed=config.seed, answer_required=compares)
    if graded and (problem_of := GRADABLE.get(config.reward.name)) is not None:
        rows = _gradable(rows, problem_of, name=config.reward.name, skip=config.data.skip_bad_rows)
    model = Path(config.model.path) if config.model.path is not None else fetch(config.model.name)
    if config.model.path is None:
        check_model_folder(model)
    check_quantization(config.quant, model)

    dataset = build_dataset(
        rows,
        _tokenizer(model, max_len=config.model.max_len),
        config.data,
        seed=config.seed,
        max_prompt_tokens=config.max_prompt_tokens,
        prompts_per_step=config.prompts_per_step,
    )
    return model, dataset, resume


def check_quantization(config: QuantConfig, model: Path) -> Plan | None:
    """Which linear layers of a checked folder are quantized, from its headers alone; None without quantization.

    Raises:
        ConfigError: the scheme does not fit the model.
    """
    if config.scheme == "none":
        return None
    where = weight_map(model)
    headers = {shard: read_header(model / shard) for shard in set(where.values())}
    shapes = {
        name.removesuffix(".weight"): tuple(headers[shard][name]["shape"])
        for name, shard in where.items()
        if name.endswith("_proj.weight")
    }
    quantization = Quantization.of(config)
    assert quantization is not None
    return quantization.plan(shapes)


def _tokenizer(model: Path, *, max_len: int) -> Any:
    """The folder's tokenizer, and a last check of what only transformers knows."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoTokenizer

    try:
        longest = getattr(
            AutoConfig.from_pretrained(model, trust_remote_code=False), "max_position_embeddings", max_len
        )
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        reason = (
            "it names code of its own (auto_map), which Forge never runs"
            if "custom code" in str(error)
            else (f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
        )
        raise ModelFolderError(
            f"{model}: config.json or the tokenizer's files are not what transformers expects ({reason}): "
            "copy them again from where the model came"
        ) from None
    if longest < max_len:
        raise ModelFolderError(
            f"{model}: the model has {longest} positions (max_position_embeddings), fewer than "
            f"model.max_len={max_len}: lower model.max_len to at most {longest}"
        )
    return tokenizer


def _gradable(rows: Rows, problem_of: Callable[[Row], str | None], *, name: str, skip: bool) -> Rows:
    """The rows whose reference answer a completion can be compared with; others are refused, or skipped and counted."""
    bad = {r.id: problem for r in rows.rows if (problem := problem_of(r)) is not None}
    if not bad:
        return rows
    if not skip:
        listed = [f"{row_id}: {problem}" for row_id, problem in list(bad.items())[:LISTED_ROWS]]
        raise DataError(
            [
                f"{rows.source}: {len(bad)} of {len(rows.rows)} rows cannot be graded by reward.name={name}: "
                "mend them, set data.skip_bad_rows=true, or choose another reward",
                *listed,
            ]
        )
    return replace(
        rows,
        rows=tuple(r for r in rows.rows if r.id not in bad),
        skipped=rows.skipped + tuple(SkippedRow(id=i, reason=problem) for i, problem in bad.items()),
    )
