"""Token ids, log-probs and versions as compact little-endian blobs. Contract: unpack(pack(x)) == x, bit for bit.

A blob is one type letter and the array's bytes. The narrowest type that holds the values exactly is taken: two bytes a
token for vocabularies up to 65,536, four bytes a log-prob when the engine computed it in float32, and one value
for a whole run of equal versions.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from inspan.trace.records import Tokens

_SAME = b"="
_HEAD = struct.Struct("<Iq")


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids (0 … 2³²-1) as a blob; anything else is a ValueError."""
    try:
        return _pack("H", tokens)
    except OverflowError:
        try:
            return _pack("I", tokens)
        except OverflowError:
            raise ValueError("a token id is negative or above 2**32 - 1") from None


def unpack_tokens(blob: bytes) -> Tokens:
    """Token ids from a blob."""
    return tuple(_unpack(blob))


def pack_floats(values: Sequence[float]) -> bytes:
    """Log-probs as float32 when that is exact, else as float64."""
    try:
        narrow = array("f", values)
    except OverflowError:
        return _pack("d", values)
    return _pack("f" if narrow.tolist() == list(values) else "d", values)


def unpack_floats(blob: bytes) -> tuple[float, ...]:
    """Log-probs from a blob."""
    return tuple(_unpack(blob))


def pack_versions(versions: Sequence[int]) -> bytes:
    """Policy versions; a run of one version takes 13 bytes whatever its length."""
    if versions and versions.count(versions[0]) == len(versions):
        return _SAME + _HEAD.pack(len(versions), versions[0])
    return _pack("q", versions)


def unpack_versions(blob: bytes) -> tuple[int, ...]:
    """Policy versions from a blob."""
    if blob[:1] == _SAME:
        count, version = _HEAD.unpack(blob[1:])
        return (version,) * count
    return tuple(_unpack(blob))


def _pack(code: str, values: Sequence[float]) -> bytes:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return code.encode() + packed.tobytes()


def _unpack(blob: bytes) -> list[Any]:
    code = blob[:1].decode()
    if code not in "HIfdq":
        raise ValueError(f"unknown packing {code!r}")
    values = array(code)
    values.frombytes(blob[1:])
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
