"""Tiny random models of each supported kind, and a reference: what transformers says about a sampled sequence."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from inspan.engine.base import Sample

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama-untied-bias": lambda: (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True)),
    "llama3-rope": lambda: (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "linear-rope": lambda: (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}),
    ),
    "qwen2": lambda: (Qwen2ForCausalLM, Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"})),
    "qwen3": lambda: (Qwen3ForCausalLM, Qwen3Config(**{**SHAPE, "head_dim": 16})),
}


def make_model(kind: str = "llama", seed: int = 0) -> Any:
    """A random model with weights large enough that its distributions are far from uniform, norms included."""
    torch.manual_seed(seed)
    cls, config = KINDS[kind]()
    model = cls(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.mul_(6)
    return model


def reference_logits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits (len(tokens), vocab) of the transformers forward, alone and without a cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def drift(model: Any, prompt_ids: tuple[int, ...], sample: Sample) -> float:
    """Largest difference of the recorded log-probs to a full forward at temperature 1."""
    logits = reference_logits(model, prompt_ids + sample.tokens).log_softmax(-1)
    chosen = logits[len(prompt_ids) - 1 : -1].gather(1, torch.tensor(sample.tokens)[:, None]).squeeze(1)
    return float((chosen - torch.tensor(sample.logprobs)).abs().max())
