"""The same promises on a GPU. `pytest -m gpu`; never run so far, see docs/status.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from forge.config import load_config
from forge.fetch import fetch
from forge.types import Completion, Episode, FinishReason, Manifest, Prompt, SamplingRequest

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

PROMPT = tuple(range(100, 120))
ON_GPU = ["placement=gpu", "trainer.ranks=1", "generator.gpu_memory_share=0.3"]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch("smollm2")


def hf_logprobs(folder: Path, completion: tuple[int, ...]) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    with torch.no_grad():
        lp = model(torch.tensor([PROMPT + completion]).cuda()).logits[0].log_softmax(-1)
    return [lp[len(PROMPT) - 1 + i, t].item() for i, t in enumerate(completion)]


def test_the_trainer_gives_hugging_faces_logprobs(smollm2: Path, tmp_path: Path) -> None:
    from forge.engine_titan import TitanTrainer, init_process

    config = load_config("grpo", [*ON_GPU, "trainer.dtype=float32"])
    init_process(0, 1, str(tmp_path / "rendezvous"), on_cpu=False, threads=1)
    trainer = TitanTrainer(config, smollm2)
    completion = tuple(range(300, 340))
    episodes = [
        Episode(
            prompt=Prompt(id="p", question="", answer="", token_ids=PROMPT),
            completion=Completion(
                token_ids=completion,
                logprobs=(-1.0,) * 40,
                versions=(0,) * 40,
                text="",
                finish_reason=FinishReason.STOP,
            ),
            group=0,
            member=m,
        )
        for m in range(3)
    ]
    found = trainer.logprobs(episodes)
    for m in range(3):  # three completions share one prompt in the pack
        assert list(found[0, m]) == pytest.approx(hf_logprobs(smollm2, completion), abs=2e-3)


def test_the_generator_takes_new_weights(smollm2: Path) -> None:
    from safetensors.torch import load_file

    from forge.engine_vllm import VllmEngine

    engine = VllmEngine(load_config("grpo", ON_GPU), smollm2)
    request = SamplingRequest(token_ids=PROMPT, temperature=0.0, max_new_tokens=16)
    before = engine.generate([request])[0].token_ids
    weights = load_file(smollm2 / "model.safetensors")
    changed = {n: (t.float() * (1 + 0.3 * torch.randn(t.shape))).bfloat16() for n, t in weights.items()}
    for version, tensors in ((1, changed), (2, weights)):
        manifest = Manifest(version=version, tensors=dict(engine.expected), num_bytes=0, changed_share=1.0)
        engine.load(manifest, tensors)
        after = engine.generate([request])[0].token_ids
        assert (after == before) is (version == 2)
