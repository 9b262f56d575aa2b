"""`forge plan key=value …`: what `forge grpo` with the same arguments would start; loads nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from forge.config import Device, GrpoConfig, to_yaml
from forge.errors import RefusedInput


def show(config: GrpoConfig) -> str:
    """The plan as text.

    Raises:
        RefusedInput: the model folder cannot be trained from, or the scheme does not fit it.
    """
    import psutil

    from forge.fetch import cached
    from forge.inputs import check_quantization
    from forge.model_folder import check_model_folder
    from forge.plan import GIB, PROMPT_TOKENS, arithmetic, parts, sizes, total_gib
    from forge.quant import Quantization

    folder = Path(config.model.path) if config.model.path else cached(config.model.name)
    model, bits = None, 16
    if folder is not None:
        check_model_folder(folder)
        model = sizes(folder, check_quantization(config.quant, folder))
        quantization = Quantization.of(config.quant)
        bits = quantization.scheme.bits if quantization is not None else 16
    planned = parts(config, model, bits)
    lines = [to_yaml(config).rstrip(), "", "processes, in order of starting"]
    for part in planned:
        estimate = "?" if part.gib is None else f"{part.gib:.1f} GiB"
        lines.append(f"  {part.name:24} {part.processes:>4} x  {part.where:14} {estimate:>10} each")
    total = total_gib(planned)
    if total is None:
        lines.append(f"  memory is not estimated: the folder of {config.model.name} is not at hand "
                     "(`forge fetch` it, or give model.path)")  # fmt: skip
    elif config.placement.device is Device.cpu:
        machine = psutil.virtual_memory().total / GIB
        lines.append(f"  all together about {total:.1f} GiB with prompts of {PROMPT_TOKENS} tokens; this machine has "
                     f"{machine:.1f} GiB" + (", which is not enough" if total > machine else ""))  # fmt: skip
    lines += ["", "a step"]
    lines += [f"  {name:24} {value}" for name, value in arithmetic(config)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns its exit status."""
    from forge.apps.common import configured, refuse

    config = configured("grpo", argv)
    if not isinstance(config, GrpoConfig):
        return config
    try:
        sys.stdout.write(show(config))
    except RefusedInput as error:
        return refuse(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
