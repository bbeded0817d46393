"""A causal language model for training, and the log-probs of its tokens.

Contract: parameters are float32 whatever the compute type ("bfloat16" computes under autocast on float32 weights, so
that small updates are not rounded away). Log-probs are of the *sampling* distribution: the temperature is applied, as
the engine does when it records them. The vocabulary projection runs on needed positions only, in bounded chunks.
Transformers and peft are imported when first needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from inspan.errors import ModelError
from inspan.learner.packing import Row
from inspan.learner.store import is_complete, read_manifest

LOGIT_CHUNK = 1 << 24
"""Most logits (tokens × vocabulary) that are alive at once: 64 MiB in float32."""

CPU_MICRO_BATCH = 2048
"""Most tokens of a micro-batch on a CPU: beyond it activations fall out of the cache (`benchmarks/learner.py`)."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters (peft). `rank` 0 trains all weights. `targets` empty: every linear layer of the blocks."""

    rank: int = 0
    alpha: float = 32.0
    targets: tuple[str, ...] = ()


def load_model(
    path: str | Path, *, lora: Lora | None = None, gradient_checkpointing: bool = False, device: str = "cpu"
) -> nn.Module:
    """Load the causal LM in directory `path` with float32 parameters, ready to train.

    Raises ModelError when the directory is not a loadable model, lacks weights, or when its logits need a correction
    that the learner does not apply (soft-capping, scaling); CheckpointError when it does not match its own manifest.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not (Path(path) / "config.json").is_file():
        raise ModelError("no config.json", where=str(path), hint="give the directory of a model with config.json")
    if is_complete(Path(path)):
        read_manifest(Path(path))
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path), dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot load the model: {error}", where=str(path), hint="is it complete?") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    model, info = loaded
    if lacking := sorted(info["missing_keys"]):
        what = f"{len(lacking)} weights are missing, e.g. {lacking[0]!r}"
        raise ModelError(what, where=str(path), hint="they would be random; get the complete model")
    return prepare(model.to(device), lora=lora, gradient_checkpointing=gradient_checkpointing)


def prepare(model: Any, *, lora: Lora | None = None, gradient_checkpointing: bool = False) -> nn.Module:
    """Make a transformers causal LM ready to train: check its logits, add adapters, turn on checkpointing."""
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"the model's {name} is not supported by the learner", where=model.config.model_type)
    if gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if lora is not None and lora.rank > 0:
        from peft import LoraConfig, get_peft_model

        targets = list(lora.targets) or "all-linear"
        scale: Any = lora.alpha  # peft's annotation asks for an int; it only divides
        model = get_peft_model(model, LoraConfig(r=lora.rank, lora_alpha=scale, target_modules=targets))
    for module in model.modules():  # a ratio of two passes is only meaningful without dropout
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            vars(module)["attention_dropout"] = 0.0
    return model.train()


def base_of(model: Any) -> Any:
    """The transformers model inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which the forward pass computes in `dtype` ("float32" or "bfloat16")."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def micro_budget(budget: int, device: torch.device) -> int:
    """Tokens of a micro-batch: `budget`, the bound on memory, or less where smaller ones are faster."""
    return min(budget, CPU_MICRO_BATCH) if device.type == "cpu" else budget


def collate(rows: Sequence[Row], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows to (`tokens` (B, L) padded right with 0, `targets` (T, 2) of (row, position), in order of the rows)."""
    longest = max(len(r.tokens) for r in rows)
    tokens = torch.tensor([list(r.tokens) + [0] * (longest - len(r.tokens)) for r in rows], dtype=torch.int64)
    targets = torch.tensor([(i, p) for i, r in enumerate(rows) for p in r.positions], dtype=torch.int64)
    return tokens.to(device), targets.reshape(-1, 2).to(device)


def token_logprobs(
    model: Any, tokens: Tensor, targets: Tensor, *, temperature: float = 1.0, dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Log-probs of the tokens at `targets`, each given what stands before it, and the entropies there.

    `tokens` is (B, L), padded right; `targets` (T, 2) of (row, position ≥ 1). Returns two float32 vectors of shape
    (T,): natural log-probs of softmax(logits / temperature), with gradient, and the entropies there, without.
    """
    base = base_of(model)
    with autocast(dtype, tokens.device):
        hidden = base.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        flat = targets[:, 0] * tokens.shape[1] + targets[:, 1]
        needed = hidden.flatten(0, 1).index_select(0, flat - 1)
        return _head_logprobs(base.get_output_embeddings(), needed, tokens.flatten()[flat], temperature)


def _head_logprobs(head: nn.Module, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Project in chunks; all but a single chunk are recomputed in the backward pass to bound the memory."""
    vocabulary = int(head.weight.shape[0])  # type: ignore[union-attr]
    size = max(1, LOGIT_CHUNK // vocabulary)
    if len(hidden) <= size:
        return _logprobs(head, hidden, labels, temperature)
    parts = [
        checkpoint(_logprobs, head, h, y, temperature, use_reentrant=False)
        for h, y in zip(hidden.split(size), labels.split(size), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])  # type: ignore[index]


def _logprobs(head: nn.Module, hidden: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    logp = logits.log_softmax(-1)
    with torch.no_grad():
        entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(1, labels[:, None])[:, 0], entropy


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the optimiser owns, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def published_tensors(model: Any) -> dict[str, Tensor]:
    """Private copies of the weights under the names of the base model, adapters merged.

    Buffers that transformers does not store are left out; so is the second name of tied weights.
    """
    base = base_of(model)
    merged: dict[str, Tensor] = {}
    if base is not model:
        for name, module in base.named_modules():
            if hasattr(module, "get_delta_weight"):
                weight = module.get_base_layer().weight
                delta = sum(module.get_delta_weight(a) for a in module.active_adapters)
                merged[f"{name}.weight"] = (weight + delta).detach().clone()
    out: dict[str, Tensor] = {}
    tied = set(getattr(base, "all_tied_weights_keys", None) or ())
    for name, tensor in base.state_dict().items():
        if ".lora_" in name or name in tied:
            continue
        plain = name.replace(".base_layer.", ".")
        out[plain] = merged[plain] if plain in merged else tensor.detach().clone()
    return out


def config_json(model: Any) -> str:
    """The model's config.json, as transformers would store it with float32 weights."""
    config = base_of(model).config
    return json.dumps(json.loads(config.to_json_string(use_diff=False)), indent=2, sort_keys=True)
