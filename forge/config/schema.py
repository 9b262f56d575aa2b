"""The configuration schema: every key, its type, default and meaning.

`docs/config.md` is generated from it. `async` is a keyword of Python, so the field is `async_`; users and YAML write
`async`. Classes are not frozen, because Hydra cannot compose frozen ones; nothing writes to them but
`GroupBuffer.set_max_age`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from forge.config.quant import CalibrationConfig, QuantConfig, RollbackConfig

MAX_PROCESSES = 4096
"""Of one kind, in one run: more is a slip of the keyboard."""


class Dtype(StrEnum):
    """A compute dtype, by its torch name."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Decay(StrEnum):
    """Shape of the learning-rate decay."""

    none = "none"
    linear = "linear"
    cosine = "cosine"


class Swap(StrEnum):
    """When a generator takes new weights."""

    in_flight = "in_flight"
    boundary = "boundary"


class Device(StrEnum):
    """What kind of machine the parts run on."""

    cpu = "cpu"
    gpu = "gpu"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The policy that is trained."""

    name: str = "smollm2"
    """A model that `forge fetch` can build ("smollm2", "tiny"), or a label for `path`."""
    path: str | None = None
    """Local Hugging Face folder (Llama, Qwen2 or Qwen3 family). null: `forge fetch NAME` provides it."""
    hub_id: str | None = None
    """Where the model lives on the Hugging Face Hub, for messages; Forge itself downloads nothing from there."""
    max_len: int = 512
    """Longest prompt plus completion, in tokens."""

    def problems(self) -> Iterator[str]:
        if self.max_len < 8:
            yield f"model.max_len must be at least 8 tokens, got {self.max_len}"


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Where prompts come from: a file or folder (`path`), or a reasoning-gym task (`task`)."""

    path: str | None = None
    """JSONL or Parquet file, or a Hugging Face dataset folder."""
    split: str = "train"
    """Split to read from a dataset folder that has several."""
    task: str | None = None
    """Name of a reasoning-gym task, for example "chain_sum"."""
    task_args: dict[str, Any] = field(default_factory=dict)
    """Settings of that task, as reasoning-gym documents them."""
    rows: int = 1000
    """Entries to generate for a task."""
    question: str = "question"
    """Column with the user's text."""
    answer: str = "answer"
    """Column with the reference answer."""
    system: str | None = None
    """System message; null leaves it to the chat template."""
    template: str = "{question}"
    """User message; `{question}` is replaced by the row's question."""
    plain_text: bool = False
    """Send the user message as plain text, without a chat template (for base models)."""
    heldout: int | None = None
    """Rows set aside for evaluation; they are never trained on. null takes a tenth, at most 100; 0 turns evaluation
    off."""
    skip_bad_rows: bool = False
    """Skip and count rows that fail validation instead of refusing the dataset."""

    def problems(self) -> Iterator[str]:
        if (self.path is None) == (self.task is None):
            got = "neither" if self.path is None else f"path={self.path} and task={self.task}"
            yield f"data needs exactly one of data.path and data.task, got {got}: set one, leave the other null"
        if self.path is not None and not Path(self.path).exists():
            yield f"data.path={self.path} does not exist: give a JSONL or Parquet file or a dataset folder"
        if self.rows < 1:
            yield f"data.rows must be at least 1, got {self.rows}"
        if self.heldout is not None and self.heldout < 0:
            yield f"data.heldout must be 0 or more rows, got {self.heldout}"
        if self.question == self.answer:
            yield f"data.question and data.answer name the same column {self.question!r}: each needs its own"
        if "{question}" not in self.template:
            yield f"data.template must contain {{question}}, got {self.template!r}"


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """How completions are scored, in worker processes of the reward actor."""

    name: str = "math"
    """"math", "exact", "format", "gym", or "package.module:Class" for a Reward of your own."""
    workers: int = 1
    """Worker processes."""
    timeout_s: float = 10.0
    """Hard limit of one call, in seconds; the worker is killed and the episode counted as failed."""
    memory_mb: int = 2048
    """Address space a worker may use on top of its own start, in MiB."""
    max_failed_share: float = 0.5
    """Largest share of one step's episodes whose reward may fail before the run stops."""

    def problems(self) -> Iterator[str]:
        if not 1 <= self.workers <= MAX_PROCESSES:
            yield f"reward.workers must be 1 to {MAX_PROCESSES}, got {self.workers}"
        if not self.timeout_s > 0:
            yield f"reward.timeout_s must be above 0 seconds, got {self.timeout_s}"
        if self.memory_mb < 64:
            yield f"reward.memory_mb must be at least 64 MiB, got {self.memory_mb}"
        if not 0 <= self.max_failed_share <= 1:
            yield f"reward.max_failed_share is a share between 0 and 1, got {self.max_failed_share}"


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """How completions are sampled for training. Truncating the distribution (top-p, top-k, min-p) is not offered:
    the ratio to an untruncated trainer would be biased by the mass cut away."""

    temperature: float = 1.0
    """Softmax temperature; log-probs of sampler and trainer are both taken at it."""
    max_new_tokens: int = 64
    """Longest completion in tokens, the end token included."""

    def problems(self) -> Iterator[str]:
        if not self.temperature > 0:
            yield f"sampling.temperature must be above 0 (greedy groups have no variance), got {self.temperature}"
        if self.max_new_tokens < 1:
            yield f"sampling.max_new_tokens must be at least 1, got {self.max_new_tokens}"


class Correction(StrEnum):
    """How the loss answers that the policy that sampled (older, quantized, in another engine) is not the trainer's.
    w is exp(trainer log-prob - sampler log-prob) of a token."""

    clip = "clip"
    """PPO's clipped ratio to the sampler: the ratio itself corrects."""
    tis = "tis"
    """Truncated importance sampling: each token's gradient is weighted by min(w, correction_high)."""
    sequence_tis = "sequence_tis"
    """The same with the product of w over a completion."""
    icepop = "icepop"
    """Weighted by w; tokens with w outside [correction_low, correction_high] carry no gradient."""
    sequence_mask = "sequence_mask"
    """Weighted by w; completions whose geometric mean of w lies outside the bounds carry no gradient."""


@dataclass(kw_only=True, slots=True)
class AlgoConfig:
    """GRPO: clipped ratio to the policy that sampled, group advantage, token-mean over the whole batch."""

    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio is clipped at 1 + clip_high (DAPO's clip-higher)."""
    correction: Correction = Correction.clip
    """clip, tis, sequence_tis, icepop or sequence_mask: see docs/quantization.md."""
    correction_low: float = 0.5
    """Lower bound of w for icepop and sequence_mask."""
    correction_high: float = 2.0
    """Upper bound of w for all but clip."""
    kl: float = 0.0
    """Weight of the k3 KL estimate to the initial policy; above 0 a reference actor is spawned."""
    scale_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); false leaves reward minus mean (Dr. GRPO)."""
    mask_truncated: bool = False
    """Leave completions cut off by a length limit out of the loss and of its denominator."""

    def problems(self) -> Iterator[str]:
        if not 0 < self.clip_low <= 1:
            yield f"algo.clip_low must be in (0, 1], got {self.clip_low}"
        if not self.clip_high > 0:
            yield f"algo.clip_high must be above 0, got {self.clip_high}"
        if not 0 < self.correction_low < 1 < self.correction_high:
            yield (
                "algo.correction_low must be in (0, 1) and algo.correction_high above 1, got "
                f"{self.correction_low} and {self.correction_high}"
            )
        if not self.kl >= 0:
            yield f"algo.kl must be 0 or more, got {self.kl}"


@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    """vLLM engines that sample completions."""

    replicas: int = 1
    """Number of engines, each in a process of its own."""
    dtype: Dtype = Dtype.bfloat16
    """Dtype of the served weights, and therefore of the published ones."""
    max_running: int = 64
    """Most requests an engine decodes at once."""
    kv_cache_gib: float = 1.0
    """KV cache of a CPU engine in GiB."""
    gpu_memory_share: float = 0.85
    """Share of a GPU's memory an engine may take."""
    tensor_parallel: int = 1
    """GPUs an engine is split over."""
    threads: int = 0
    """CPU threads of an engine; 0 takes all cores of the machine."""
    canary_max_gap: float = 1.0
    """Largest mean |log-prob difference| to the trainer, in nats, on pinned prompt tokens after each new version. A
    generator above it is started anew. 0 does not check."""

    def problems(self) -> Iterator[str]:
        if not 1 <= self.replicas <= MAX_PROCESSES:
            yield f"generator.replicas must be 1 to {MAX_PROCESSES}, got {self.replicas}"
        if self.max_running < 1:
            yield f"generator.max_running must be at least 1, got {self.max_running}"
        if not self.kv_cache_gib > 0:
            yield f"generator.kv_cache_gib must be above 0 GiB, got {self.kv_cache_gib}"
        if not 0 < self.gpu_memory_share <= 1:
            yield f"generator.gpu_memory_share must be in (0, 1], got {self.gpu_memory_share}"
        if self.tensor_parallel < 1:
            yield f"generator.tensor_parallel must be at least 1, got {self.tensor_parallel}"
        if self.threads < 0:
            yield f"generator.threads must be 0 (all cores) or more, got {self.threads}"
        if not self.canary_max_gap >= 0:
            yield f"generator.canary_max_gap must be 0 (no check) or more nats, got {self.canary_max_gap}"


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """A TorchTitan model under FSDP2, and its optimizer."""

    ranks: int = 2
    """Processes the model is sharded over."""
    micro_batch: int = 16
    """Episodes packed into one forward and backward pass of a rank. The result does not depend on it."""
    dtype: Dtype = Dtype.float32
    """Compute dtype; master weights, optimizer state and log-probs are float32 always."""
    lr: float = 1.0e-5
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.95
    """AdamW's second-moment decay."""
    eps: float = 1.0e-8
    """AdamW's epsilon."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    decay: Decay = Decay.none
    """Decay of the learning rate after warm-up, to 0 at the last step."""
    max_grad_norm: float = 1.0
    """Gradient norm is clipped to this."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass to save memory."""
    max_skipped_steps: int = 3
    """Consecutive steps with a non-finite loss or gradient that are skipped before the run stops."""
    threads: int = 0
    """CPU threads of a rank; 0 shares the machine's cores between ranks."""

    def problems(self) -> Iterator[str]:
        if not 1 <= self.ranks <= MAX_PROCESSES:
            yield f"trainer.ranks must be 1 to {MAX_PROCESSES}, got {self.ranks}"
        if self.micro_batch < 1:
            yield f"trainer.micro_batch must be at least 1 episode, got {self.micro_batch}"
        if not self.lr > 0:
            yield f"trainer.lr must be above 0, got {self.lr}"
        if self.weight_decay < 0:
            yield f"trainer.weight_decay must be 0 or more, got {self.weight_decay}"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"trainer.{name} must be in [0, 1), got {getattr(self, name)}"
        if not self.eps > 0:
            yield f"trainer.eps must be above 0, got {self.eps}"
        if self.warmup_steps < 0:
            yield f"trainer.warmup_steps must be 0 or more, got {self.warmup_steps}"
        if not self.max_grad_norm > 0:
            yield f"trainer.max_grad_norm must be above 0, got {self.max_grad_norm}"
        if self.max_skipped_steps < 0:
            yield f"trainer.max_skipped_steps must be 0 or more, got {self.max_skipped_steps}"
        if self.threads < 0:
            yield f"trainer.threads must be 0 (share the cores) or more, got {self.threads}"


@dataclass(kw_only=True, slots=True)
class AsyncConfig:
    """How far generation may run ahead of training."""

    max_age: int = 0
    """Most optimizer steps between the oldest weights that sampled a token of a group and the weights it trains.
    0 is synchronous."""
    window: float = 0.0
    """Share of the buffer within which a finished group may pass an unfinished older one; 0 is strict order."""
    swap: Swap = Swap.in_flight
    """in_flight: running requests go on with the new weights; boundary: they finish on the old ones first."""

    def problems(self) -> Iterator[str]:
        if self.max_age < 0:
            yield f"async.max_age must be 0 (synchronous) or more steps, got {self.max_age}"
        if not 0 <= self.window <= 1:
            yield f"async.window is a share between 0 and 1, got {self.window}"

    def window_groups(self, prompts_per_step: int) -> int:
        """Groups W the window spans: max(1, floor(window * (max_age + 1) * prompts_per_step))."""
        return max(1, math.floor(self.window * (self.max_age + 1) * prompts_per_step))

    def bound(self, prompts_per_step: int) -> int:
        """Largest age a trained group can have: S + ceil((W - 1) / P)."""
        return self.max_age + math.ceil((self.window_groups(prompts_per_step) - 1) / prompts_per_step)


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Greedy evaluation on the held-out rows, before and after training."""

    every: int = 0
    """Evaluate every so many steps as well; 0 only at start and end."""

    def problems(self) -> Iterator[str]:
        if self.every < 0:
            yield f"eval.every must be 0 or more steps, got {self.every}"


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    """Atomic checkpoints of trainer state and data order."""

    every: int = 100
    """Write one every so many steps; 0 turns them off."""
    keep: int = 2
    """Newest checkpoints to keep; an older one goes only after a newer one is complete."""
    on_interrupt: bool = False
    """Write one on Ctrl-C before ending."""
    export: bool = True
    """Save the last weights as a Hugging Face folder at the end."""

    def problems(self) -> Iterator[str]:
        if self.every < 0:
            yield f"checkpoint.every must be 0 (off) or more steps, got {self.every}"
        if self.keep < 1:
            yield f"checkpoint.keep must be at least 1, got {self.keep}"


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "forge"
    """Project of Weights & Biases."""

    def problems(self) -> Iterator[str]:
        yield from ()


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    """Where the parts run."""

    device: Device = Device.cpu
    """cpu: the whole loop on one machine without a GPU; gpu: engines and ranks take one GPU each."""

    def problems(self) -> Iterator[str]:
        yield from ()


@dataclass(kw_only=True, slots=True)
class GrpoConfig:
    """A GRPO run."""

    name: str | None = None
    """Name of the run folder under `out`/grpo; null takes the time."""
    out: str = "runs"
    """Folder that holds run folders."""
    seed: int = 0
    """Seed of data order, sampling and everything else that draws."""
    steps: int = 20
    """Optimizer steps to train."""
    prompts_per_step: int = 8
    """Prompts, and so groups, a step trains on."""
    group_size: int = 8
    """Completions sampled for each prompt."""
    resume: str = "never"
    """never, auto (newest complete checkpoint of the named run, else start), or the path of a checkpoint."""
    stall_timeout_s: float = 600.0
    """Seconds without any progress after which the run ends and says what each part waits for."""
    hang_timeout_s: float = 300.0
    """Seconds without an answer or an engine step after which a generator is killed and started anew."""
    max_restarts: int = 3
    """How often each generator, the reward, reference and calibration actor may be started anew when it dies; and how
    often the run goes back to its last checkpoint when the trainer or the weight store does."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    rollback: RollbackConfig = field(default_factory=RollbackConfig)
    async_: AsyncConfig = field(default_factory=AsyncConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)

    @property
    def episodes_per_step(self) -> int:
        """Completions a step samples."""
        return self.prompts_per_step * self.group_size

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for one new token."""
        return self.model.max_len - 1

    @property
    def age_bound(self) -> int:
        """Largest age a trained group can have, in optimizer steps."""
        return self.async_.bound(self.prompts_per_step)

    def problems(self) -> Iterator[str]:
        """One line for each rule the configuration breaks: rule, value found, what to do."""
        for f in fields(self):
            part = getattr(self, f.name)
            if is_dataclass(part):
                yield from part.problems()  # type: ignore[union-attr]
        if self.name is not None and (not self.name or "/" in self.name or self.name in (".", "..")):
            yield f"name must be a plain folder name, got {self.name!r}"
        if not 0 <= self.seed < 2**32:
            yield f"seed must be a whole number from 0 to {2**32 - 1}, got {self.seed}"
        if self.placement.device is Device.cpu and self.generator.tensor_parallel > 1:
            yield (
                f"generator.tensor_parallel={self.generator.tensor_parallel} needs GPUs, but placement is cpu: "
                "use generator.replicas for more engines"
            )
        if self.placement.device is Device.cpu and self.quant.scheme == "fp8_dynamic":
            yield "quant.scheme=fp8_dynamic needs GPUs, but placement is cpu: int8_dynamic is its counterpart there"
        if self.steps < 1:
            yield f"steps must be at least 1, got {self.steps}"
        if self.prompts_per_step < 1:
            yield f"prompts_per_step must be at least 1, got {self.prompts_per_step}"
        if self.group_size < 2:
            yield (
                f"group_size must be at least 2, got {self.group_size}: the advantage compares completions of one "
                "prompt with each other, and a group of one has nothing to compare with"
            )
        if self.sampling.max_new_tokens >= self.model.max_len:
            yield (
                f"sampling.max_new_tokens={self.sampling.max_new_tokens} leaves no room for a prompt within "
                f"model.max_len={self.model.max_len}: raise model.max_len or lower sampling.max_new_tokens"
            )
        if self.prompts_per_step >= 1 and self.group_size >= 2:
            episodes = self.episodes_per_step
            if self.trainer.micro_batch > episodes:
                yield (
                    f"trainer.micro_batch={self.trainer.micro_batch} is more than the {episodes} episodes of a step "
                    f"(prompts_per_step={self.prompts_per_step} x group_size={self.group_size}): legal values are "
                    f"1 to {episodes}"
                )
            if self.trainer.ranks > episodes:
                yield (
                    f"trainer.ranks={self.trainer.ranks} is more than the {episodes} episodes of a step: "
                    f"legal values are 1 to {episodes}"
                )
        if self.quant.qat.enabled and self.quant.qat.start_step >= self.steps:
            yield (
                f"quant.qat.start_step={self.quant.qat.start_step} never comes: the run has steps={self.steps}, "
                "numbered from 0"
            )
        if self.quant.scheme != "none" and self.calibration.min_tokens >= self.model.max_len:
            yield (
                f"calibration.min_tokens={self.calibration.min_tokens} refuses every row: none is longer than "
                f"model.max_len={self.model.max_len}"
            )
        if self.quant.scheme == "int8_static" and self.calibration.prompts < self.calibration.min_rows:
            yield (
                f"calibration.prompts={self.calibration.prompts} is less than calibration.min_rows="
                f"{self.calibration.min_rows}, and the first scales are made from those prompts alone"
            )
        if self.trainer.warmup_steps > self.steps:
            yield f"trainer.warmup_steps={self.trainer.warmup_steps} is more than steps={self.steps}"
        if not self.stall_timeout_s > 0:
            yield f"stall_timeout_s must be above 0 seconds, got {self.stall_timeout_s}"
        if not self.hang_timeout_s > 0:
            yield f"hang_timeout_s must be above 0 seconds, got {self.hang_timeout_s}"
        if self.max_restarts < 0:
            yield f"max_restarts must be 0 (a dead part ends the run) or more, got {self.max_restarts}"
        if self.resume == "auto" and self.name is None:
            yield "resume=auto continues a named run: set name=…, or give resume the path of a checkpoint"
        if self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            yield f"resume must be auto, never or the path of a checkpoint folder, got {self.resume!r}"
