"""Counting tokens for a budget. Contract: the same text counts the same, and nothing is asked of the model's server.

With the model's `tokenizer.json` the count of a text is exact; without it a token is taken for four characters, what
English prose comes to in the vocabularies of large models. What a chat template puts around a message is a flat charge,
and tool schemas are not counted: the budget's reserve is there for what no count sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from inspan.errors import ModelError

Count = Callable[[str], int]
"""How many tokens a text has."""
CHARACTERS_PER_TOKEN = 4.0
PER_MESSAGE = 4
"""Tokens that a chat template puts around a message: its role and its ends."""


def estimate(text: str) -> int:
    """A count without a tokenizer: a token for four characters, rounded up."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


@lru_cache(maxsize=8)
def counter(tokenizer: str | None) -> Count:
    """The count by a `tokenizer.json` (or the folder that holds one); the estimate when there is none to go by.

    Raises ModelError when the file cannot be read.
    """
    if not tokenizer:
        return estimate
    path = Path(tokenizer)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer

        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"the tokenizer cannot be read: {error}", where=str(file)) from error

    @lru_cache(maxsize=65536)
    def count(text: str) -> int:
        return len(loaded.encode(text, add_special_tokens=False).ids)

    return count
