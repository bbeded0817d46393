"""A model's weights in the layout that the engine computes with. Contract: same logits as the transformers forward.

Built from a directory (config.json + safetensors), a transformers model, or a config with a state dict, for
decoder-only models of the Llama kind (Llama, Mistral without sliding window, Qwen2, Qwen3). Everything is a private
copy: nothing outside can change it. The layout differs from the checkpoint in ways that leave the function unchanged:

- q, k and v are one matrix, gate and up are one matrix, and matrices are stored (in, out);
- q and k dimensions are interleaved per head, so that a rotary embedding is one complex product
  (scores are invariant under a common permutation of a head's dimensions);
- queries carry attention's factor 1/sqrt(d), and a block's matrices the weights of the norms in front of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from inspan.errors import ModelError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Values of config.json's `model_type` that the engine can run."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base and scaling. `kind` is "default", "linear" or "llama3" (as transformers names them)."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def frequencies(self, dim: int) -> Tensor:
        """Inverse frequencies, shape (dim/2,), float32; the llama3 rule is the one of Llama 3.1's release."""
        inverse = 1.0 / (self.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        if self.kind == "linear":
            return inverse / self.factor
        if self.kind == "llama3":
            low, high = self.original_positions / self.low_freq_factor, self.original_positions / self.high_freq_factor
            wavelength = 2 * math.pi / inverse
            scaled = torch.where(wavelength > low, inverse / self.factor, inverse)
            smooth = (self.original_positions / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            between = (1 - smooth) * scaled / self.factor + smooth * scaled
            return torch.where((wavelength >= high) & (wavelength <= low), between, scaled)
        return inverse


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The numbers that fix a model's shape. Two models with equal specs can exchange weights."""

    kind: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope: Rope
    tied: bool
    positions: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str = "config") -> ModelSpec:
        """Read a transformers config (old and new rope keys); raises `ModelError` on what the engine cannot run."""
        kind = config.get("model_type")
        if kind not in SUPPORTED:
            raise ModelError(
                f"model_type {kind!r} is not supported by the torch engine",
                where=where,
                hint=f"supported: {', '.join(SUPPORTED)}; serve other models over an OpenAI-compatible endpoint",
            )
        _refuse_variants(config, where)
        try:
            hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or hidden // heads)
            spec = cls(
                kind=str(kind),
                vocab=int(config["vocab_size"]),
                hidden=hidden,
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                intermediate=int(config["intermediate_size"]),
                eps=float(config.get("rms_norm_eps", 1e-6)),
                rope=_rope(config, where),
                tied=bool(config.get("tie_word_embeddings", False)),
                positions=int(config.get("max_position_embeddings", 2048)),
            )
        except KeyError as missing:
            raise ModelError(f"the model config lacks {missing}", where=where) from None
        if heads % kv_heads or head_dim % 2:
            raise ModelError(f"{heads} heads, {kv_heads} kv heads, head_dim {head_dim} do not fit", where=where)
        return spec

    @property
    def parameters(self) -> int:
        """Number of parameters (biases and norms aside)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def kv_bytes(self) -> int:
        """Bytes of float32 KV per token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4


def _refuse_variants(config: Mapping[str, Any], where: str) -> None:
    """Raise on options of the supported families that would change the function."""
    wrong = {
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "mlp_bias": bool(config.get("mlp_bias")),
        "quantization_config": bool(config.get("quantization_config")),
        "sliding_window": bool(config.get("use_sliding_window"))
        or (config.get("model_type") == "mistral" and config.get("sliding_window") is not None),
    }
    for key, bad in wrong.items():
        if bad:
            raise ModelError(f"{key} = {config.get(key)!r} is not supported by the torch engine", where=where)


def _rope(config: Mapping[str, Any], where: str) -> Rope:
    raw = dict(config.get("rope_scaling") or {})
    raw.update(config.get("rope_parameters") or {})
    kind = str(raw.get("rope_type") or raw.get("type") or "default")
    if kind not in ("default", "linear", "llama3") or float(raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError(f"rope scaling {raw!r} is not supported", where=where, hint="default, linear or llama3")
    theta = raw.get("rope_theta", config.get("rope_theta", 10_000.0))
    original = raw.get("original_max_position_embeddings") or config.get("max_position_embeddings", 8192)
    return Rope(
        theta=float(theta),
        kind=kind,
        factor=float(raw.get("factor", 1.0)),
        low_freq_factor=float(raw.get("low_freq_factor", 1.0)),
        high_freq_factor=float(raw.get("high_freq_factor", 4.0)),
        original_positions=int(original),
    )


@dataclass(slots=True)
class Layer:
    """One block's tensors. `qkv` (D, (H+2K)·d), `out` (H·d, D), `gate_up` (D, 2I), `down` (I, D)."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None  # ((H+2K)·d,), Qwen2
    out_bias: Tensor | None = None  # (D,)
    qk_norm: Tensor | None = None  # (H+K, d), Qwen3


class Weights:
    """A model's weights, fused. Immutable: policies share one object, a weight swap makes another."""

    def __init__(self, spec: ModelSpec, state: Mapping[str, Any]) -> None:
        self.spec = spec
        self.embed, self.norm, self.head, self.layers = self._fuse(state)

    def updated(self, state: Mapping[str, Any]) -> Weights:
        """Other weights of the same shape, from a state dict; raises `ModelError` on a missing or misshapen tensor."""
        return Weights(self.spec, state)

    def _fuse(self, state: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor, list[Layer]]:
        with torch.inference_mode():
            s = self.spec
            read = _Reader(state)
            embed = read("model.embed_tokens.weight", s.vocab, s.hidden).clone()
            head = embed.t() if s.tied else read("lm_head.weight", s.vocab, s.hidden).t()
            if not s.tied or embed.numel() <= 1 << 26:
                head = head.contiguous()  # faster to multiply with; a large tied vocabulary is not stored twice
            layers = [self._layer(read, f"model.layers.{i}.") for i in range(s.layers)]
            return embed, read("model.norm.weight", s.hidden).clone(), head, layers

    def _layer(self, read: _Reader, at: str) -> Layer:
        s = self.spec
        d = s.head_dim
        # queries carry attention's 1/sqrt(d); where they are normed, the norm's weight does
        scale, inner = (1.0, d**-0.5) if s.kind == "qwen3" else (d**-0.5, 1.0)
        q = read(at + "self_attn.q_proj.weight", s.heads * d, s.hidden) * scale
        k = read(at + "self_attn.k_proj.weight", s.kv_heads * d, s.hidden)
        v = read(at + "self_attn.v_proj.weight", s.kv_heads * d, s.hidden)
        out = read(at + "self_attn.o_proj.weight", s.hidden, s.heads * d)
        gate = read(at + "mlp.gate_proj.weight", s.intermediate, s.hidden)
        up = read(at + "mlp.up_proj.weight", s.intermediate, s.hidden)
        norm = read(at + "input_layernorm.weight", s.hidden)
        mlp_norm = read(at + "post_attention_layernorm.weight", s.hidden)
        layer = Layer(
            qkv=(torch.cat((interleave(q, d), interleave(k, d), v)) * norm).t().contiguous(),
            out=out.t().contiguous(),
            gate_up=(torch.cat((gate, up)) * mlp_norm).t().contiguous(),
            down=read(at + "mlp.down_proj.weight", s.hidden, s.intermediate).t().contiguous(),
        )
        if read.has(at + "self_attn.q_proj.bias"):
            qb = read(at + "self_attn.q_proj.bias", s.heads * d) * scale
            kb = read(at + "self_attn.k_proj.bias", s.kv_heads * d)
            vb = read(at + "self_attn.v_proj.bias", s.kv_heads * d)
            layer.qkv_bias = torch.cat((interleave(qb, d), interleave(kb, d), vb))
        if read.has(at + "self_attn.o_proj.bias"):
            layer.out_bias = read(at + "self_attn.o_proj.bias", s.hidden).clone()
        if s.kind == "qwen3":
            qn = interleave(read(at + "self_attn.q_norm.weight", d), d) * inner
            kn = interleave(read(at + "self_attn.k_norm.weight", d), d)
            layer.qk_norm = torch.cat((qn.expand(s.heads, d), kn.expand(s.kv_heads, d)))
        return layer


class _Reader:
    """Typed, shape-checked look-ups in a state dict."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def has(self, name: str) -> bool:
        return name in self._state

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = self._state.get(name)
        if not isinstance(tensor, Tensor):
            raise ModelError(f"the weights lack the tensor {name!r}", hint="is the checkpoint complete and merged?")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {shape}")
        return tensor.detach().to(device="cpu", dtype=torch.float32)


def interleave(rows: Tensor, dim: int) -> Tensor:
    """Reorder each head's `dim` rows from halves (0…d/2, d/2…d) to pairs (0, d/2, 1, d/2+1, …)."""
    shape = rows.shape
    return rows.view(-1, 2, dim // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def read_config(path: str | Path) -> dict[str, Any]:
    """A model directory's config.json; raises `ModelError` when it is missing or not JSON."""
    file = Path(path) / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = "give a directory with config.json and *.safetensors"
        raise ModelError("no config.json", where=str(path), hint=hint) from None
    except ValueError as error:
        raise ModelError(f"config.json is not JSON: {error}", where=str(file)) from None


def read_state(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a directory's *.safetensors files; raises `ModelError` when there are none or one is broken."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ModelError("no *.safetensors files", where=str(path))
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read the weights: {error}", where=str(file)) from error
    return state


Source = Any
"""Where a model comes from: a directory, a transformers model, or a pair (config, state dict)."""


def load_weights(source: Source) -> Weights:
    """Weights from a directory, from a transformers model, or from a (config, state dict) pair."""
    if isinstance(source, str | Path):
        spec = ModelSpec.from_config(read_config(source), where=str(source))
        return Weights(spec, read_state(source))
    if isinstance(source, tuple) and len(source) == 2:
        config, state = source
        raw = config if isinstance(config, Mapping) else config.to_dict()
        return Weights(ModelSpec.from_config(raw), state)
    config, state_dict = getattr(source, "config", None), getattr(source, "state_dict", None)
    if config is not None and callable(state_dict):
        return Weights(ModelSpec.from_config(config.to_dict()), cast(Mapping[str, Any], state_dict()))
    raise ModelError(
        f"cannot load a model from {type(source).__name__}",
        hint="a directory, a transformers model or (config, state dict)",
    )
