"""`forge quantize key=value …`: quantize a model folder or a run's checkpoint, and prove what was written.

    forge quantize model=PATH scheme=int8_static data=FILE        calibrate on a dataset's prompts and answers
    forge quantize model=PATH scheme=int8_static --rollouts       … on completions that the model samples itself
    forge quantize --run runs/grpo/NAME                           the newest checkpoint of a run, as it was trained
    forge quantize model=PATH scheme=x86_static                   PT2E: a torch.export file for Inductor

scheme, group_size, layers, skip, smooth and samples are short for quant.… and calibration.samples.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge.config import GrpoConfig, QuantConfig, load_config
from forge.errors import ConfigError, PartFailed, RefusedInput
from forge.files import path_problem, scratch_folder
from forge.progress import Progress
from forge.quant import Format, Quantization

SHORT = {
    "scheme": "quant.scheme",
    "group_size": "quant.group_size",
    "layers": "quant.layers",
    "skip": "quant.skip",
    "smooth": "quant.smooth",
    "samples": "calibration.samples",
}
PT2E = ("x86_static", "arm_static")


async def quantize(config: GrpoConfig, args: argparse.Namespace, arch: str | None) -> None:
    """Check, calibrate, write, prove."""
    from forge.inputs import check_inputs
    from forge.parity import unproven
    from forge.quant_report import write_layer_report

    started = time.monotonic()
    format = None if args.format is None else Format(args.format)
    if format is not None:
        _quantization(config).check_format(format)
    target = _target(config, args, arch)
    checkpoint, scales = _checkpoint(args.run) if args.run else (None, {})
    # rows are observed, not trained on: no batch has to be filled, nothing held out, no answer graded
    config = replace(config, prompts_per_step=1, data=replace(config.data, heldout=0))
    model, dataset, _ = check_inputs(config, None, graded=False)
    if model.resolve() in target.resolve().parents:
        raise ConfigError(f"--target {target} lies in the model folder {model}: choose a place outside it")
    prompts = [dataset.prompt(i) for i in range(min(config.calibration.samples, len(dataset)))]
    rows = _with_answers(prompts, model, max_len=config.model.max_len)
    with Progress(total_steps=0, title=f"quantize {config.model.name}: {args.scheme}") as progress:
        if arch is not None:
            await _pt2(model, rows, arch, target, config, progress)
            return
        async with AsyncExitStack() as stack:
            logs = stack.enter_context(scratch_folder())
            written = stack.enter_context(unproven(target))
            if args.rollouts:
                progress.stage("sampling rollouts to calibrate on")
                rows = await _rollouts(config, model, prompts, logs)
            result = await _convert(config, model, rows, checkpoint, scales, written, format, logs, stack, progress)
            write_layer_report(written, result["layers"], title=f"{config.model.name}, {args.scheme}")
            progress.note(f"quantized {len(result['plan'].quantized)} of "
                          f"{len(result['plan'].quantized) + len(result['plan'].left)} linears")  # fmt: skip
            progress.stage("checking it in a fresh vLLM")
            await _prove(config, model, written, result, logs, progress)
        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        peak_gib = max(peak / 2**20, result["memory_gib"])
        progress.note(f"{target}: {time.monotonic() - started:.0f} s, peak memory {peak_gib:.1f} GiB of one process")


async def _convert(
    config: GrpoConfig,
    model: Path,
    rows: Sequence[tuple[int, ...]],
    checkpoint: Path | None,
    scales: dict[str, Any],
    target: Path,
    format: Format | None,
    logs: Path,
    stack: AsyncExitStack,
    progress: Progress,
) -> dict[str, Any]:
    """Smooth, calibrate and write in a calibration actor; returns what the proof and the reports need."""
    from forge.actors.calibrator import start_smoothed
    from forge.quant.calibration import Gate

    quantization = _quantization(config)
    format = format or quantization.scheme.formats[0]
    progress.stage("loading")
    if checkpoint is not None:  # smoothed before it was trained
        config = replace(config, quant=replace(config.quant, smooth=0.0))
    calibrator, _ = await start_smoothed(config, model, rows, scratch=logs, stack=stack)
    if checkpoint is not None:
        await calibrator.call("load_state", checkpoint)
    if not scales and quantization.scheme.static:
        progress.stage(f"calibrating on {len(rows)} rows")
        measurement = await calibrator.call_one("measure", rows, [], {})
        decision = Gate(config.calibration, config.rollback, static=True, steps=1).decide(measurement)
        for reason in decision.reasons:
            progress.note(reason)
        if not decision.accepted:
            raise PartFailed("calibration", "rejected: " + "; ".join(decision.reasons[:3]))
        scales = dict(decision.scales)
    progress.stage("writing it")
    layers = await calibrator.call_one("save_quantized", target, format, scales)
    sequences = [r[: config.model.max_len - 1] for r in rows if len(r) > 1][: config.calibration.prompts]
    static = scales if quantization.scheme.static else {}
    return {
        "plan": await calibrator.call_one("plan"),
        "layers": layers,
        "format": format,
        "sequences": sequences,
        "served": await calibrator.call_one("score", sequences, static),
        "unquantized": await calibrator.call_one("score", sequences, None),
        "label": quantization.label,
        "memory_gib": await calibrator.call_one("memory"),
    }


async def _prove(
    config: GrpoConfig, model: Path, target: Path, result: dict[str, Any], logs: Path, progress: Progress
) -> None:
    from forge.actors.stock import score_in_stock_vllm
    from forge.parity import folder_bytes, other_kernels_bound, parity_record, write_parity

    plain = replace(config, quant=QuantConfig())
    stock = await score_in_stock_vllm(plain, target, result["sequences"], logs=logs, unquantized=model)
    record = parity_record(
        sequences=result["sequences"],
        exported=stock.logprobs,
        served=result["served"],
        unquantized=result["unquantized"],
        bound=other_kernels_bound(result["served"], result["unquantized"]),
        facts={
            "scheme": result["label"],
            "format": result["format"].value,
            "bytes": folder_bytes(target),
            "unquantized_bytes": folder_bytes(model),
            "tokens_per_second": stock.tokens_per_second,
            "unquantized_tokens_per_second": stock.unquantized_tokens_per_second,
        },
    )
    write_parity(target, record)
    progress.note(
        f"log-probs of {record['tokens']} tokens differ by {record['exported_vs_served']['mean']:.4f} from the "
        f"prepared model's and by {record['exported_vs_unquantized']['mean']:.4f} from the unquantized model's; "
        f"{record['bytes'] / record['unquantized_bytes']:.2f} of the bytes, "
        f"{stock.tokens_per_second:.0f} against {stock.unquantized_tokens_per_second:.0f} tokens/s"
    )


async def _rollouts(config: GrpoConfig, model: Path, prompts: Sequence[Any], logs: Path) -> list[tuple[int, ...]]:
    from forge.actors.generator import Generator
    from forge.engine_vllm import prepare_environment
    from forge.mesh import spawn
    from forge.types import SamplingRequest

    plain = replace(config, quant=QuantConfig())
    env = prepare_environment(plain, logs)
    generator = await spawn("generator 0", Generator, plain, model, "", 0, log_dir=logs, env=env)
    try:
        await generator.call("setup")
        requests = [
            SamplingRequest(
                token_ids=p.token_ids,
                temperature=config.sampling.temperature,
                max_new_tokens=config.sampling.max_new_tokens,
                seed=config.seed + i,
            )
            for i, p in enumerate(prompts)
        ]
        found = await generator.call_one("generate", requests)
    finally:
        await generator.stop()
    return [p.token_ids + c.token_ids for p, c in zip(prompts, found, strict=True)]


async def _pt2(
    model: Path, rows: Sequence[tuple[int, ...]], arch: str, target: Path, config: GrpoConfig, progress: Progress
) -> None:
    import asyncio

    from forge.quant.pt2e import export_pt2

    progress.stage(f"PT2E for {arch}: capturing, calibrating on {len(rows)} rows, converting")
    report = await asyncio.to_thread(
        export_pt2,
        model,
        rows,
        arch=arch,
        target=target,
        max_len=config.model.max_len,
        skip="|".join(filter(None, ["lm_head", config.quant.skip])),
    )
    progress.note(
        f"{target}: quantized {report.quantized} of {report.linears} linears, KL {report.kl:.4f} nats a token from the "
        f"float model, {report.seconds:.0f} s, peak memory {report.peak_rss_gib:.1f} GiB"
    )


def _quantization(config: GrpoConfig) -> Quantization:
    found = Quantization.of(config.quant)
    assert found is not None
    return found


def _target(config: GrpoConfig, args: argparse.Namespace, arch: str | None) -> Path:
    """What is written.

    Raises:
        ConfigError: it exists, or could not be written at the end.
    """
    if args.target is None:
        name = config.name or f"{config.model.name}-{args.scheme}"
        target = Path(config.out) / "quantize" / (name if arch is None else f"{name}.pt2")
    else:
        target = Path(args.target)
    if not target.name or path_problem(str(target)):
        raise ConfigError(f"--target must name a folder or file to write, got {str(args.target)!r}")
    if arch is not None and target.suffix != ".pt2":
        raise ConfigError(f"--target {target}: scheme={args.scheme} writes a file whose name ends in .pt2")
    if target.exists():
        raise ConfigError(f"--target {target} exists: choose another, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--target {target} cannot be written ({reason}): choose a folder that can") from None
    return target


def _refuse_for_pt2(args: argparse.Namespace, chosen: Mapping[str, str]) -> None:
    """Options of the other schemes would change nothing."""
    names = {name: f"--{name}" for name in ("run", "rollouts", "format") if getattr(args, name)}
    names |= {k: k.removeprefix("quant.") for k in ("quant.group_size", "quant.layers", "quant.smooth") if k in chosen}
    if names:
        raise ConfigError(
            f"scheme={args.scheme} knows no {', '.join(names.values())}: it calibrates on data=…, and of the others' "
            "options takes skip and samples"
        )


def _with_answers(prompts: Sequence[Any], model: Path, *, max_len: int) -> list[tuple[int, ...]]:
    """Rows to calibrate on without sampling any: prompts, each with its reference answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [(*p.token_ids, *tokenizer.encode(p.answer, add_special_tokens=False))[: max_len - 1] for p in prompts]


def _checkpoint(run: Path) -> tuple[Path, dict[str, Any]]:
    """The newest complete checkpoint of a run and its live scales.

    Raises:
        ConfigError: there is none, or the run was not quantized.
    """
    from forge.checkpoint import Checkpoints, read_state
    from forge.types import ActivationScale

    found = Checkpoints(run / "checkpoints", keep=1).latest()
    if found is None:
        raise ConfigError(f"--run {run}: no complete checkpoint in {run / 'checkpoints'}")
    good = read_state(found).calibration.get("good", [])
    return found, {n: ActivationScale(**s) for n, s in good[-1][1].items()} if good else {}


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns its exit status."""
    from forge.apps.common import refuse, supervised

    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    parser = argparse.ArgumentParser(
        prog="forge quantize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--run", type=Path, help="folder of a run with checkpoints; its configuration is used")
    parser.add_argument("--rollouts", action="store_true", help="calibrate on completions that the model samples")
    parser.add_argument("--format", choices=("compressed-tensors", "torchao"), help="default: what engines load")
    parser.add_argument("--target", help="folder (or .pt2 file) to write; default runs/quantize/NAME")
    args = parser.parse_intermixed_args(list(argv))
    overrides = []
    for text in args.overrides:
        key, equals, value = text.partition("=")
        overrides.append(f"{SHORT.get(key, key)}{equals}{value}")
    chosen = {k: v for k, _, v in (o.partition("=") for o in overrides)}
    arch, args.scheme = None, None
    if (scheme := chosen.get("quant.scheme")) in PT2E:
        arch, args.scheme = str(scheme).removesuffix("_static"), scheme
        overrides = [o for o in overrides if not o.startswith("quant.scheme=")]
    try:
        file = args.run / "config.yaml" if args.run else None
        if args.run and (given := sorted(k for k in chosen if k.split(".")[0] == "model")):
            raise ConfigError(f"--run {args.run} quantizes that run's own model: leave {', '.join(given)} out")
        if arch is not None:
            _refuse_for_pt2(args, chosen)
        config = load_config("grpo", overrides, file=file)
        if arch is None and config.quant.scheme == "none":
            raise ConfigError("scheme must be set: for example scheme=int8_dynamic")
    except RefusedInput as error:
        return refuse(error)
    args.scheme = args.scheme or config.quant.scheme
    return supervised(quantize(config, args, arch))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
