"""The protocols that harnesses speak, by the path of their endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from inspan.gateway.dialects.base import Dialect
from inspan.gateway.dialects.chat import CHAT
from inspan.gateway.dialects.messages import MESSAGES
from inspan.gateway.dialects.responses import RESPONSES

DIALECTS: Final[Mapping[str, Dialect]] = {"chat/completions": CHAT, "responses": RESPONSES, "messages": MESSAGES}
"""Dialects by what follows `/v1/` in the path."""


def dialect_of(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """The dialect in which to answer a request to any path, errors included."""
    for tail, dialect in DIALECTS.items():
        if path.endswith("/" + tail) or f"/v1/{tail}/" in path:
            return dialect
    return MESSAGES if b"anthropic-version" in headers else CHAT
