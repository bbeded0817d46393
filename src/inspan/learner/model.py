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
from inspan.learner.attention import install, installed, prepare_parts
from inspan.learner.packing import Packed, Row, plan
from inspan.learner.store import is_complete, read_manifest

LOGIT_CHUNK = 1 << 24
"""Most logits (tokens × vocabulary) that are alive at once: 64 MiB in float32."""

CPU_MICRO_BATCH = 4096
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
    """Make a transformers causal LM ready to train: check it, choose its attention, add adapters, checkpointing."""
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ModelError(f"the model's {name} is not supported by the learner", where=model.config.model_type)
    install(model)
    if gradient_checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if lora is not None and lora.rank > 0:
        from peft import LoraConfig, get_peft_model

        targets = list(lora.targets) or "all-linear"
        scale: Any = lora.alpha  # peft's annotation asks for an int; it only divides
        try:
            model = get_peft_model(model, LoraConfig(r=lora.rank, lora_alpha=scale, target_modules=targets))
        except ValueError as error:
            hint = "train.lora.targets names linear layers, e.g. q_proj; leave it empty for all of them"
            raise ModelError(f"adapters cannot be added: {error}", where=f"{targets}", hint=hint) from None
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


def micro_batches(rows: Sequence[Row], budget: int, device: torch.device) -> list[tuple[int, ...]]:
    """The plan of `packing.plan`, in smaller micro-batches than the memory's `budget` where those are faster."""
    return plan(rows, min(budget, CPU_MICRO_BATCH) if device.type == "cpu" else budget)


def token_logprobs(
    model: Any, packed: Packed, *, temperature: float = 1.0, dtype: str = "float32"
) -> tuple[Tensor, Tensor]:
    """Log-probs of a micro-batch's targets, each given what stands before it in its row, and the entropies there.

    Returns two float32 vectors of shape (targets,): natural log-probs of softmax(logits / temperature), with gradient,
    and that distribution's entropies, without. Raises ModelError when the model was not prepared.
    """
    base = base_of(model)
    if not installed(base):
        raise ModelError("the model was not prepared for training", hint="use load_model or prepare")
    device = base.get_output_embeddings().weight.device

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    with autocast(dtype, device):
        hidden = base.get_decoder()(
            input_ids=column(packed.tokens)[None],
            position_ids=column(packed.depths)[None],
            attention_mask=torch.empty(1, 1, 1, 1, device=device),  # four dimensions: transformers makes none
            use_cache=False,
            parts=prepare_parts(packed.segments, device),
        ).last_hidden_state[0]
        needed = hidden.index_select(0, column(packed.contexts))
        return _head_logprobs(base.get_output_embeddings(), needed, column(packed.labels), temperature)


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
    config = json.loads(base_of(model).config.to_json_string(use_diff=False))
    public = {key: value for key, value in config.items() if not key.startswith("_")}
    return json.dumps(public | {"dtype": "float32"}, indent=2, sort_keys=True)
