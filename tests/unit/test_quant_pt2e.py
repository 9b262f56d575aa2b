"""PT2E: the file computes what the converted model computes, near the float model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from forge.errors import ConfigError, DataError, ModelFolderError
from forge.fetch import fetch
from forge.quant.pt2e import export_pt2

pytestmark = pytest.mark.filterwarnings("default")
ROWS = [tuple((13 * i + 7 * j) % 500 for j in range(12 + i)) for i in range(4)]


def test_the_file_is_near_the_float_model_and_not_equal(tmp_path: Path) -> None:
    folder = fetch("tiny")
    target = tmp_path / "model.pt2"
    report = export_pt2(folder, ROWS, arch="x86", target=target, max_len=64)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert (report.linears, report.quantized, report.left) == (len(linears), len(linears) - 1, ("lm_head",))
    loaded = torch.export.load(target).module()
    kl = 0.0
    for row in ROWS:
        ids = torch.tensor([row])
        a, b = model(ids).logits.log_softmax(-1), loaded(ids).log_softmax(-1)
        kl += float((a.exp() * (a - b)).sum())
    kl /= sum(map(len, ROWS))
    assert kl == pytest.approx(report.kl, rel=1e-3)
    assert 0 < kl < 1e-3
    # another length than any row had: the file takes 2 to 64 tokens
    assert loaded(torch.arange(50)[None]).shape == (1, 50, 512)
    assert report.file_bytes < 0.4 * 4 * sum(p.numel() for p in model.parameters()) + 400_000


@pytest.mark.parametrize(
    ("rows", "arch", "error"),
    [
        ([], "x86", DataError),
        ([(1,)], "x86", DataError),
        ([(1,) * 65], "x86", DataError),
        (ROWS, "mips", ConfigError),
    ],
)
def test_bad_input_is_refused_before_anything_loads(
    rows: list[tuple[int, ...]], arch: str, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        export_pt2(tmp_path / "no such folder", rows, arch=arch, target=tmp_path / "x.pt2", max_len=64)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocabulary of 512"):
        export_pt2(fetch("tiny"), [(1, 2), (3, 512)], arch="x86", target=tmp_path / "x.pt2", max_len=64)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_is_not_a_number_is_named(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(fetch("tiny"), dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(ModelFolderError, match="layers.1.mlp.up_proj.weight"):
        export_pt2(tmp_path / "broken", ROWS, arch="arm", target=tmp_path / "x.pt2", max_len=64)
    assert not (tmp_path / "x.pt2").exists()
