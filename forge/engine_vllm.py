"""A vLLM engine that samples completions and takes new weights while it runs.

The engine lives in this process and is driven by one thread (`EngineThread`): it steps while requests are running
and takes weights between two steps, so a token is sampled wholly by one version and knows which.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.config import Device, GrpoConfig, Swap
from forge.engine_vllm_quant import engine_arguments, load_quantized
from forge.errors import CanaryFailed, WeightsMismatch
from forge.model_folder import read_header, weight_map
from forge.quant import Quantization
from forge.quant.pack import linear_shapes, quantized_specs
from forge.types import Canary, Completion, FinishReason, Manifest, SamplingRequest, TensorSpec

MISSING_LOGPROB = math.nan
"""Stands for a log-prob the engine did not give; such a token is fed to the trainer but not trained."""


def prepare_environment(config: GrpoConfig, scratch: Path | None = None) -> dict[str, str]:
    """Environment variables that vLLM reads at import; set them before it is imported.

    Args:
        scratch: where it puts its temporary files, which it leaves behind when it is killed.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no copy and no second interpreter
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if scratch is not None:
        env["TMPDIR"] = str(scratch)
    if config.placement.device is Device.cpu:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, math.ceil(config.generator.kv_cache_gib)))
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # trainer and generator share the cores
    return env


@dataclass(slots=True)
class _Running:
    request: SamplingRequest
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class VllmEngine:
    """vLLM's LLMEngine with versioned weights. Not thread-safe: one thread calls it.

    Args:
        config: the run's configuration.
        folder: model folder; its weights are version 0.
        replica: number of this engine, noted on its completions.
    """

    def __init__(self, config: GrpoConfig, folder: Path, replica: int = 0) -> None:
        os.environ.update(prepare_environment(config))
        from vllm import EngineArgs, LLMEngine

        g = config.generator
        on_cpu = config.placement.device is Device.cpu
        if on_cpu and g.threads:
            import torch

            torch.set_num_threads(g.threads)
        self.replica = replica
        self.version = 0
        self.scale_version = 0
        self.max_len = config.model.max_len
        self.canary_max_gap = g.canary_max_gap
        self.quantization = Quantization.of(config.quant)
        self.expected = expected_tensors(folder, g.dtype.value)
        quantized: dict[str, Any] = {}
        if self.quantization is not None:
            plan = self.quantization.plan(linear_shapes(self.expected))
            quantized = engine_arguments(self.quantization, plan)
            self.expected = quantized_specs(self.expected, self.quantization, served=g.dtype.value)
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                dtype=g.dtype.value,
                max_model_len=config.model.max_len,
                max_num_seqs=g.max_running,
                tensor_parallel_size=g.tensor_parallel,
                gpu_memory_utilization=g.gpu_memory_share,
                enforce_eager=on_cpu,  # compiling costs minutes on a CPU
                # vLLM cannot rewind a seeded CPU generator after half a prompt: prompts are computed whole there
                enable_chunked_prefill=not on_cpu,
                max_num_batched_tokens=max(config.model.max_len, 8192),
                logprobs_mode="processed_logprobs",  # as sampled: temperature included
                async_scheduling=False,  # a step's tokens are sampled by the weights that are live in that step
                disable_log_stats=True,
                trust_remote_code=False,
                seed=config.seed,
                **quantized,
            )
        )
        self.tokenizer = self.engine.get_tokenizer()
        self._running: dict[str, _Running] = {}
        self._set_aside: list[tuple[str, Completion]] = []
        """Requests that ended while something else was waited for."""
        self._count = 0
        self.sampled_tokens = 0

    def add(self, request: SamplingRequest) -> str:
        """Queue a request; returns its id."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        request_id = str(self._count)
        params = SamplingParams(
            temperature=request.temperature,
            max_tokens=min(request.max_new_tokens, self.max_len - len(request.token_ids)),
            seed=request.seed,
            ignore_eos=request.ignore_eos,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(request.token_ids)), params)
        self._running[request_id] = _Running(request)
        return request_id

    @property
    def busy(self) -> bool:
        """True while requests are running or waiting, or finished ones were not fetched."""
        return bool(self._set_aside) or self.engine.has_unfinished_requests()

    def step(self) -> list[tuple[str, Completion]]:
        """Run one engine step; returns the requests it finished."""
        earlier, self._set_aside = self._set_aside, []
        return earlier + self._finished(self.engine.step())

    def _finished(self, outputs: Sequence[Any]) -> list[tuple[str, Completion]]:
        """Note what requests sampled; those that ended."""
        finished: list[tuple[str, Completion]] = []
        for output in outputs:
            running = self._running[output.request_id]
            (delta,) = output.outputs
            new = list(delta.token_ids)
            running.token_ids += new
            running.logprobs += _logprobs(new, delta.logprobs)
            running.versions += [self.version] * len(new)
            self.sampled_tokens += len(new)
            if output.finished:
                finished.append((output.request_id, self._complete(output.request_id, delta.finish_reason)))
        return finished

    def _complete(self, request_id: str, reason: str | None) -> Completion:
        running = self._running.pop(request_id)
        return Completion(
            token_ids=tuple(running.token_ids),
            logprobs=tuple(running.logprobs),
            versions=tuple(running.versions),
            text=self.tokenizer.decode(running.token_ids, skip_special_tokens=True),
            finish_reason=FinishReason.STOP if reason == "stop" else FinishReason.LENGTH,
            replica=self.replica,
        )

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Run requests to their end, in this thread; for scripts, evaluation and tests."""
        ids = [self.add(r) for r in requests]
        done: dict[str, Completion] = {}
        while len(done) < len(ids):
            done |= dict(self.step())
        return [done[i] for i in ids]

    def check(self, manifest: Manifest) -> None:
        """Compare a version's manifest with what this engine's model needs.

        Raises:
            WeightsMismatch: naming every tensor that is missing, extra, misshapen or of another dtype.
        """
        own = "" if self.quantization is None else self.quantization.label
        if manifest.scheme != own:
            raise WeightsMismatch(
                f"generator {self.replica}",
                f"serves {own or 'unquantized weights'}, but version {manifest.version} is published as "
                f"{manifest.scheme or 'unquantized'}; version {self.version} stays live",
            )
        problems = compare(self.expected, manifest.tensors)
        if self.quantization is not None and self.quantization.scheme.static:
            quantized = {n.removesuffix(".weight_scale") for n in self.expected if n.endswith(".weight_scale")}
            problems += [f"no activation scale for {n}" for n in sorted(quantized - set(manifest.scales))]
        if problems:
            raise WeightsMismatch(
                f"generator {self.replica}",
                f"version {manifest.version} does not fit, version {self.version} stays live: " + "; ".join(problems),
            )

    def load(self, manifest: Manifest, tensors: Mapping[str, Any]) -> None:
        """Swap in a version, between two steps. Running requests keep their tokens and go on with the new weights.

        Cached keys and values of the old weights are dropped: running requests are computed anew from their tokens.

        Raises:
            WeightsMismatch: the tensors are not the ones the manifest names; the old version stays live.
        """
        self.check(manifest)
        held = {
            n: TensorSpec(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()
        }
        problems = compare(manifest.tensors, held)
        if problems:
            raise WeightsMismatch(
                f"generator {self.replica}", f"version {manifest.version} arrived damaged: " + "; ".join(problems)
            )
        if self.quantization is None:
            self.engine.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(tensors.items()), "is_checkpoint_format": True}
            )
        else:
            self.engine.collective_rpc(load_quantized, args=(tensors, self.quantization, manifest.scales))
        self.engine.collective_rpc(_refresh_tied_head)
        if not self.engine.reset_prefix_cache(reset_running_requests=True):
            raise WeightsMismatch(
                f"generator {self.replica}", "the prefix cache of the old weights could not be dropped"
            )
        self.version, self.scale_version = manifest.version, manifest.scale_version

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob of every token of each sequence but the first, at temperature 1, by the live weights.

        Requests that are running go on beside it.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        ids = []
        for sequence in sequences:
            self._count += 1
            ids.append(str(self._count))
            self.engine.add_request(ids[-1], TokensPrompt(prompt_token_ids=list(sequence)), params)
        found: dict[str, list[float]] = {}
        while len(found) < len(ids):
            for output in self.engine.step():
                if output.request_id in self._running:
                    self._set_aside += self._finished([output])
                elif output.finished:
                    entries = output.prompt_logprobs[1:]
                    found[output.request_id] = _logprobs(output.prompt_token_ids[1:], entries)
        return [found[i] for i in ids]

    def check_canary(self, canary: Canary) -> float:
        """Score the pinned tokens by the live weights; returns the mean |log-prob difference| to the trainer, in nats.

        Names, shapes and digests say that the right tensors arrived; this says that the engine computes with them.

        Raises:
            CanaryFailed: it is above `generator.canary_max_gap`, or not a number.
        """
        own = self.score(canary.token_ids)
        pairs = [p for o, c in zip(own, canary.logprobs, strict=True) for p in zip(o, c, strict=True)]
        gap = sum(abs(a - b) for a, b in pairs) / len(pairs)
        if not gap <= self.canary_max_gap:
            raise CanaryFailed(
                f"generator {self.replica}",
                f"with version {self.version} it scores {len(pairs)} pinned tokens {gap:.3f} nats a token off the "
                f"trainer, above generator.canary_max_gap={self.canary_max_gap:g}: it does not compute with the "
                "weights that were trained",
            )
        return gap


def _refresh_tied_head(worker: Any) -> None:
    """Derive a tied head's compute form from the embedding that was just loaded.

    `reload_weights` processes the layers whose names arrive. A tied lm_head has none: on a CPU it keeps computing with
    the copy it packed at start, and vLLM only warns that it "failed to load weights" (0.32).
    """
    model = worker.model_runner.get_model()
    head = getattr(model, "lm_head", None)
    if head is None or not getattr(model.config, "tie_word_embeddings", False):
        return
    embedding = model.model.embed_tokens
    if head is not embedding:
        head.weight = embedding.weight
    head.quant_method.process_weights_after_loading(head)


def expected_tensors(folder: Path, dtype: str) -> dict[str, TensorSpec]:
    """What a complete version of the folder's model holds: its safetensors headers, in the served dtype.

    A separate lm_head of a model that ties it is left out: the tied weight travels once, under the embedding's name.
    """
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    where = weight_map(folder)
    headers = {shard: read_header(folder / shard) for shard in set(where.values())}
    expected = {
        name: TensorSpec(shape=tuple(headers[shard][name]["shape"]), dtype=dtype)
        for name, shard in where.items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if tied:
        expected.pop("lm_head.weight", None)
    return expected


def compare(expected: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]) -> list[str]:
    """Differences between two sets of tensors, each naming the tensor."""
    problems = [f"missing {n}" for n in expected if n not in found]
    problems += [f"extra {n}" for n in found if n not in expected]
    problems += [
        f"{n} is {found[n].dtype}{list(found[n].shape)}, needs {e.dtype}{list(e.shape)}"
        for n, e in expected.items()
        if n in found and found[n] != e
    ]
    return problems


def _logprobs(token_ids: Sequence[int], entries: Sequence[Mapping[int, Any] | None] | None) -> list[float]:
    if entries is None:
        return [MISSING_LOGPROB] * len(token_ids)
    values: list[float] = []
    for token, entry in zip(token_ids, entries, strict=True):
        value = entry[token].logprob if entry and token in entry else None
        values.append(value if value is not None and math.isfinite(value) else MISSING_LOGPROB)
    return values


@dataclass(slots=True)
class _Call:
    """Work on the engine between two steps."""

    function: Callable[[VllmEngine], Any]
    idle: bool
    """Wait until nothing runs; requests that come later wait for the call."""
    future: Future[Any] = field(default_factory=Future)


class EngineThread:
    """Drives an engine from a thread of its own, for an asyncio loop.

    Consumes requests and calls; waits when there is neither; unblocked by `generate`, `load`, `score` and `close`;
    produces completions. Cancelling a waiting caller leaves its request running to its end, unread.
    """

    def __init__(self, build: Callable[[], VllmEngine], *, swap: Swap) -> None:
        self._build = build
        self._swap = swap
        self._wake = threading.Condition()
        self._requests: deque[tuple[SamplingRequest, Future[Completion]]] = deque()
        self._calls: deque[_Call] = deque()
        self._futures: dict[str, Future[Completion]] = {}
        self._closing = False
        self._ready: Future[VllmEngine] = Future()
        self.busy_seconds = 0.0
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)

    async def start(self) -> VllmEngine:
        """Build the engine in its thread; raises what building raised."""
        self._thread.start()
        return await asyncio.wrap_future(self._ready)

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Sample all requests; they share the engine with everything else that is running."""
        futures: list[Future[Completion]] = [Future() for _ in requests]
        with self._wake:
            self._starts_work()
            self._requests.extend(zip(requests, futures, strict=True))
            self._wake.notify()
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

    async def load(self, manifest: Manifest, tensors: Mapping[str, Any]) -> dict[str, float]:
        """Swap weights and check the canary before anything sampled with them is handed out.

        Returns:
            "swap", seconds that the engine stood still; where there is a canary, "canary_seconds" and "canary_gap".
        """

        def swap(engine: VllmEngine) -> dict[str, float]:
            start = time.perf_counter()
            engine.load(manifest, tensors)
            swapped = time.perf_counter()
            found = {"swap": swapped - start}
            if manifest.canary is not None:
                found["canary_gap"] = engine.check_canary(manifest.canary)
                found["canary_seconds"] = time.perf_counter() - swapped
            return found

        found: dict[str, float] = await self._call(swap, idle=self._swap is Swap.boundary)
        return found

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens by the live weights, when nothing else runs."""
        found: list[list[float]] = await self._call(lambda engine: engine.score(sequences), idle=True)
        return found

    def stuck_seconds(self) -> float:
        """Since when the engine has made no step although it has work; 0 while it has none."""
        return time.monotonic() - self._moved if self._has_work() else 0.0

    def _has_work(self) -> bool:
        return bool(self._futures or self._requests or self._calls)

    def _starts_work(self) -> None:
        if not self._has_work():  # standing still counts from now on, not from when the last work ended
            self._moved = time.monotonic()

    async def _call(self, function: Callable[[VllmEngine], Any], *, idle: bool) -> Any:
        call = _Call(function, idle)
        with self._wake:
            self._starts_work()
            self._calls.append(call)
            self._wake.notify()
        return await asyncio.wrap_future(call.future)

    def close(self) -> None:
        """End the thread after its current step; whatever still runs is cancelled."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(engine)
        while self._wait(engine):
            self._moved = time.monotonic()
            if self._calls and not (self._calls[0].idle and engine.busy):
                self._answer(engine)
                continue
            start = time.perf_counter()
            try:
                for request_id, completion in engine.step():
                    self._settle(self._futures.pop(request_id), completion)
            except Exception as error:
                # an engine that failed once is not trusted again: every waiting caller is told
                self._fail(error)
                return
            self.busy_seconds += time.perf_counter() - start

    def _wait(self, engine: VllmEngine) -> bool:
        """Admit what is queued; block while there is nothing to do. False when closing."""
        with self._wake:
            while not (self._closing or self._requests or self._calls or engine.busy):
                self._wake.wait()
            if self._closing:
                return False
            admit = not (self._calls and self._calls[0].idle)
            queued = list(self._requests) if admit else []
            if admit:
                self._requests.clear()
        for request, future in queued:
            try:
                self._futures[engine.add(request)] = future
            except Exception as error:
                future.set_exception(error)
        return True

    def _answer(self, engine: VllmEngine) -> None:
        with self._wake:
            call = self._calls.popleft()
        try:
            call.future.set_result(call.function(engine))
        except CanaryFailed as error:
            self._fail(error)  # what runs is told as well: nothing that it sampled may reach the trainer
            call.future.set_exception(error)
        except Exception as error:
            call.future.set_exception(error)

    def _settle(self, future: Future[Completion], completion: Completion) -> None:
        if not future.cancelled():
            future.set_result(completion)

    def _fail(self, error: Exception) -> None:
        with self._wake:
            self._closing = True
            waiting: list[Future[Any]] = [
                *self._futures.values(),
                *(f for _, f in self._requests),
                *(c.future for c in self._calls),
            ]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
