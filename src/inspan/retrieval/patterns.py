"""Regular expressions that a model may write. Contract: matching takes time linear in the text."""

from __future__ import annotations

from typing import Any

from inspan.errors import InputError


def linear(pattern: str) -> Any:
    """A compiled RE2 expression. Raises InputError for a bad pattern, or when google-re2 is not installed."""
    try:
        import re2
    except ImportError:
        raise InputError("regular expressions need google-re2", hint="pip install 'inspan[retrieval]'") from None
    try:
        return re2.compile(pattern)
    except (re2.error, TypeError, ValueError, UnicodeError) as error:
        raise InputError(f"bad pattern: {error}") from None
