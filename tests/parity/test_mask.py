"""Masking: what is volatile by its form is masked, once and for all, and nothing else is."""

from __future__ import annotations

import datetime as dt
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspan.parity.mask import mask

MOMENTS = st.datetimes(dt.datetime(1990, 1, 1), dt.datetime(2090, 1, 1))
VOLATILE = st.one_of(
    MOMENTS.map(dt.datetime.isoformat),
    MOMENTS.map(lambda at: at.strftime("%Y-%m-%d")),
    MOMENTS.map(lambda at: at.strftime("%A, %B %d, %Y")),
    MOMENTS.map(lambda at: at.strftime("%a %b %d %H:%M:%S UTC %Y")),
    MOMENTS.map(lambda at: at.strftime("%H:%M:%S")),
    st.uuids().map(str),
    st.binary(min_size=20, max_size=20).map(bytes.hex),
    st.from_regex(r"/tmp/[a-z0-9_]{8}/work", fullmatch=True),
    st.integers(10**9, 10**13).map(str),
    st.integers(1024, 65535).map(lambda port: f"http://127.0.0.1:{port}"),
)
PLAIN = st.sampled_from(
    [
        "You fix issues. ",
        "\n",
        "Use the tools; ",
        "at most 12 calls. ",
        "Python 3.11, ",
        "-",
        "(",
        ")",
        "/",
        ":",
        "a",
        "1",
    ]
)


@given(st.lists(st.one_of(VOLATILE, PLAIN, st.text(max_size=8)), max_size=12).map("".join))
def test_masking_twice_is_masking_once(text: str) -> None:
    assert mask(mask(text)) == mask(text)


@given(VOLATILE.flatmap(lambda one: st.tuples(st.just(one), VOLATILE)))
def test_volatile_values_leave_no_trace_of_themselves(pair: tuple[str, str]) -> None:
    for value in pair:
        text = f"You fix issues. It is {value} now."
        masked = mask(text)
        assert masked.startswith("You fix issues. It is ") and masked.endswith(" now.") and "⟨" in masked
        assert not any(c.isdigit() for c in masked.removeprefix("You fix issues. It is http://127.0.0.1"))


@given(st.text(alphabet=st.characters(categories=["L", "P", "Zs"], exclude_characters="⟨⟩/\\"), max_size=60))
def test_text_without_digits_is_left_alone(text: str) -> None:
    days = ("Mon", "Tues", "Wednes", "Thurs", "Fri", "Satur", "Sun")
    assert mask(text) == text or any(day + "day" in text for day in days)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Today is Tue Dec  1 13:40:29 UTC 2026.", "Today is ⟨date⟩."),
        ("Today's date: 2026-12-01 (Tuesday)", "Today's date: ⟨date⟩ (⟨date⟩)"),
        ("on 3 March 2026 at 9:05 PM", "on ⟨date⟩ at ⟨time⟩"),
        ("Working directory: /tmp/inspan-x1y2/work, shell: bash", "Working directory: ⟨path⟩, shell: bash"),
        ("cwd=/private/var/folders/aa/b_c/T/tmp12", "cwd=⟨path⟩"),
        ("session 123e4567-e89b-12d3-a456-426614174000;", "session ⟨uuid⟩;"),
        ("HEAD is at 3f2a9bc (fix)", "HEAD is at ⟨hash⟩ (fix)"),
        ("http://localhost:43121/r/AbC-d_1234567890xyz/v1", "http://localhost:⟨port⟩/r/⟨key⟩/v1"),
        ("nonce: a8Kd93LmQ0xZ72bbTT", "nonce: ⟨nonce⟩"),
        ("Claude Code 2.0.14 on Linux 6.1, gpt-4.1-2025", "Claude Code 2.0.14 on Linux 6.1, gpt-4.1-2025"),
        ("at most 100 lines, 3 tools, top_p 0.95", "at most 100 lines, 3 tools, top_p 0.95"),
        ("getUserByIdFromDatabase deadbeef", "getUserByIdFromDatabase deadbeef"),
    ],
)
def test_what_prompts_hold(text: str, masked: str) -> None:
    assert mask(text) == masked


def test_uuids_are_masked_as_such() -> None:
    assert mask(str(uuid.UUID(int=2**127 + 12345))) == "⟨uuid⟩"
