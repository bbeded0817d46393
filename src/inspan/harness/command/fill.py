"""Placeholders in a recipe's texts. Contract: pure; what is put in is never read for placeholders again."""

from __future__ import annotations

import re
from collections.abc import Mapping

from inspan.config.command import NAMES, PLACEHOLDER


def fill(text: str, values: Mapping[str, str]) -> str:
    """A text with its placeholders replaced; `{name:role}` is looked up as "name:role", what is no placeholder stays.

    Raises KeyError for a role that is not there.
    """

    def value(found: re.Match[str]) -> str:
        return values[found[0][1:-1]] if found[1] in NAMES else found[0]

    return PLACEHOLDER.sub(value, text)
