"""A Hugging Face folder as a TorchTitan model: configuration, names, weights, attention on CPU.

Llama, Qwen2 and Qwen3 differ only in details (q/k/v bias, q/k norm, RoPE scaling), so one titan decoder serves all
three, with Hugging Face's half-rotation RoPE and separate q, k, v projections: every titan parameter then is one
Hugging Face tensor as it lies.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, GQAttention, QKVLinear
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.protocols.module import Module

from forge.batch import Pack
from forge.errors import ModelFolderError
from forge.model_folder import not_computed, weight_map

_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.attention.qkv_linear.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.qkv_linear.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.qkv_linear.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
}


def hf_name(titan_name: str) -> str:
    """Hugging Face name of a titan parameter."""
    titan_name = titan_name.replace("._checkpoint_wrapped_module", "")  # activation checkpointing wraps each block
    layer = re.search(r"layers\.(\d+)\.", titan_name)
    key = re.sub(r"layers\.\d+\.", "layers.{}.", titan_name)
    stem, _, leaf = key.rpartition(".")
    mapped = _NAMES[key] if key in _NAMES else f"{_NAMES[stem]}.{leaf}"
    return mapped.format(layer[1]) if layer else mapped


def hf_module(titan_name: str) -> str:
    """Hugging Face name of a titan linear layer."""
    return hf_name(f"{titan_name}.weight").removesuffix(".weight")


class PackedAttention(Module):
    """Attention over a pack on CPU: one masked call for each group, so cost grows with group length squared."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: list[tuple[int, int, Tensor]],
        scale: float | None = None,
        enable_gqa: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        out = [
            F.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, start:stop],
                v[:, :, start:stop],
                attn_mask=visible,
                scale=scale,
                enable_gqa=enable_gqa,
            )
            for start, stop, visible in attention_masks
        ]
        return torch.cat(out, dim=2).transpose(1, 2)


class ScaledRoPE(CosSinRoPE):
    """Half-rotation RoPE with the frequency scaling of Llama 3.1, which titan has for its complex form only."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> Tensor:
        c = self.config
        inv_freq = 1.0 / (c.theta ** (torch.arange(0, c.dim, 2).float() / c.dim))
        # As transformers' rope type "llama3": long waves are stretched, short ones kept, a ramp between.
        wavelength = 2 * math.pi / inv_freq
        ramp = (c.original_max_position_embeddings / wavelength - c.low_freq_factor) / (
            c.high_freq_factor - c.low_freq_factor
        )
        smooth = ramp.clamp(0, 1)
        inv_freq = (1 - smooth) * inv_freq / c.scaling_factor + smooth * inv_freq
        angles = torch.outer(torch.arange(c.max_seq_len).float(), inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def titan_config(hf: Mapping[str, Any], *, max_len: int, on_cpu: bool) -> Llama3Model.Config:
    """The titan model that computes what the Hugging Face configuration describes.

    Raises:
        ModelFolderError: for a family, activation or RoPE scaling that would not be computed exactly.
    """
    family = hf.get("model_type")
    if family not in ("llama", "qwen2", "qwen3"):
        raise ModelFolderError(
            f"model_type must be llama, qwen2 or qwen3, got {family!r}: use a model of these families"
        )
    if problems := list(not_computed(hf)):
        raise ModelFolderError(problems)
    dim, heads = hf["hidden_size"], hf["num_attention_heads"]
    kv_heads = hf.get("num_key_value_heads") or heads
    head_dim = hf.get("head_dim") or dim // heads
    vocab, hidden = hf["vocab_size"], hf["intermediate_size"]
    qkv_bias = family == "qwen2" or bool(hf.get("attention_bias"))
    wo_bias = family == "llama" and bool(hf.get("attention_bias"))
    mlp_bias = bool(hf.get("mlp_bias"))
    tied = bool(hf.get("tie_word_embeddings"))
    init = {"weight": skip_param_init, "bias": skip_param_init}  # weights are loaded, never drawn
    norm = partial(RMSNorm.Config, eps=hf.get("rms_norm_eps", 1e-6), param_init=init)
    inner = PackedAttention.Config() if on_cpu else FlexAttention.Config()

    def linear(n_in: int, n_out: int, bias: bool) -> Linear.Config:
        return Linear.Config(in_features=n_in, out_features=n_out, bias=bias, param_init=init)

    def block() -> Llama3TransformerBlock.Config:
        return Llama3TransformerBlock.Config(
            attention_norm=norm(normalized_shape=dim),
            ffn_norm=norm(normalized_shape=dim),
            attention=GQAttention.Config(
                n_heads=heads,
                n_kv_heads=kv_heads,
                head_dim=head_dim,
                dim=dim,
                qkv_linear=QKVLinear.Config(
                    head_dim=head_dim,
                    wq=linear(dim, heads * head_dim, qkv_bias),
                    wkv=linear(dim, kv_heads * head_dim, qkv_bias),
                ),
                wo=linear(heads * head_dim, dim, wo_bias),
                qk_norm=norm(normalized_shape=head_dim) if family == "qwen3" else None,
                inner_attention=inner,
                rope=_rope(hf, head_dim, max_len),
            ),
            feed_forward=FeedForward.Config(
                w1=linear(dim, hidden, mlp_bias), w2=linear(hidden, dim, mlp_bias), w3=linear(dim, hidden, mlp_bias)
            ),
        )

    return Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=init),
        norm=norm(normalized_shape=dim),
        lm_head=linear(dim, vocab, False),
        layers=[block() for _ in range(hf["num_hidden_layers"])],
    )


def _rope(hf: Mapping[str, Any], head_dim: int, max_len: int) -> CosSinRoPE.Config:
    rope = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    if kind == "default":
        return CosSinRoPE.Config(dim=head_dim, max_seq_len=max_len, theta=theta)
    assert kind == "llama3"  # not_computed refused all others
    return ScaledRoPE.Config(
        dim=head_dim,
        max_seq_len=max_len,
        theta=theta,
        scaling_factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )


def attention_masks(pack: Pack, *, on_cpu: bool) -> Any:
    """What the model's attention takes as `attention_masks` for a pack."""
    if on_cpu:
        return [(start, stop, pack.visible(start, stop)) for start, stop in pack.blocks()]
    from torchtitan.models.common.attention import create_attention_mask

    groups, members = pack.groups, pack.members

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = (members[k] < 0) | (members[k] == members[q])
        return (q >= k) & (groups[q] == groups[k]) & same

    length = len(pack.token_ids)
    return create_attention_mask(visible, 1, None, length, length, device=pack.token_ids.device)


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a folder by its Hugging Face name; the index decides which shard a name is read from."""
    where = weight_map(folder)
    for shard in sorted(set(where.values())):
        with safe_open(folder / shard, framework="pt") as file:
            for name in (n for n, s in where.items() if s == shard):
                yield name, file.get_tensor(name)


def load_weights(model: nn.Module, folder: Path, *, tied: bool) -> None:
    """Fill a model (sharded or not) from a folder, accounting for every name.

    Raises:
        ModelFolderError: names that are missing, extra or misshapen, and a separate lm_head that differs from the
            embedding it is declared to share.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    wanted = {hf_name(n): p for n, p in model.named_parameters()}
    if tied:
        wanted["model.embed_tokens.weight"] = wanted.pop("lm_head.weight", wanted.get("model.embed_tokens.weight"))  # type: ignore[arg-type]
    problems: list[str] = []
    head: Tensor | None = None
    embedding: Tensor | None = None
    for name, tensor in read_weights(folder):
        if tied and name == "lm_head.weight":
            head = tensor
            continue
        if name.endswith("rotary_emb.inv_freq"):
            continue
        parameter = wanted.pop(name, None)
        if parameter is None:
            problems.append(f"{name} is in the folder but not in the model its config.json describes")
            continue
        if tuple(parameter.shape) != tuple(tensor.shape):
            problems.append(f"{name} has shape {tuple(tensor.shape)}, config.json asks for {tuple(parameter.shape)}")
            continue
        if name == "model.embed_tokens.weight":
            embedding = tensor
        with torch.no_grad():
            value = tensor.to(parameter.dtype)
            if isinstance(parameter, DTensor):
                parameter.copy_(
                    distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
                )
            else:
                parameter.copy_(value)
    problems += [f"{name} is not in the folder" for name in wanted]
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        problems.append("lm_head.weight differs from model.embed_tokens.weight although config.json ties them")
    if problems:
        raise ModelFolderError([f"{folder}: {p}" for p in problems])
