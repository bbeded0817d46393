"""A harness is recognised on another day, and told apart when it changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspan.trace.parity import MASK, Harness, common, fits, masked, told

LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
RUN = {"type": "function", "function": {"name": "run", "description": "Runs it.", "parameters": {"type": "object"}}}
PROMPT = (
    "You are an agent. It is {day}. Your working directory is {place} and the session {id}.\n"
    "Use the tools. Never guess. Today's build is {build}.\nAnswer with one line."
)
DAYS = ["2026-11-30", "Tue Dec 01 2026", "1 December 2026", "11/30/2026", "2026-12-01T08:15:00Z", "Monday, 7 Dec"]


def prompt(day="2026-11-30", place="/tmp/inspan-x1/work", id="0b5e1f3a-9c1d-4f4e-8e5b-0a1b2c3d4e5f", build="a81f00c3"):
    return PROMPT.format(day=day, place=place, id=id, build=build)


def root(text, *tools):
    return {"role": "system", "content": text, "tools": list(tools)}


@pytest.mark.parametrize("day", DAYS)
def test_dates_ids_places_and_hashes_are_masked_by_their_form(day):
    other = prompt(day, "/tmp/inspan-zz/work", "11111111-2222-3333-4444-555555555555", "77aa00ff")
    assert masked(other) == masked(prompt()) and "2026" not in masked(other)
    assert "Never guess." in masked(other)


def test_the_same_harness_on_another_day_does_not_differ_and_a_changed_one_is_named():
    seen = Harness()
    for user in ("ada", "bo", "cy"):
        seen.see("main", told(root(prompt() + f"\nThe user is {user} and likes {user[::-1]} most.", LOOK, RUN)))
    (way,) = seen.roles["main"]
    assert way.system.endswith(f"The user is {MASK} and likes {MASK} most.")
    another = root(prompt("Wed Dec 02 2026", "/tmp/q") + "\nThe user is dee and likes tea most.", RUN, LOOK)
    assert seen.difference("main", told(another)) is None
    assert Harness.from_json(seen.to_json()).difference("main", told(another)) is None
    edited = {**LOOK, "function": {**LOOK["function"], "description": "Looks twice."}}
    found = seen.difference("main", told(root(prompt(), edited, RUN)))
    assert found is not None
    assert "main: tool look differs" in found and '- "description": "Looks.",' in found and "twice" in found
    found = seen.difference("main", told(root(prompt().replace("Never guess", "Guess"), LOOK)))
    assert "tool run is gone" in found and "the system prompt differs" in found and "+Use the tools. Guess." in found
    assert "role 'other' was not seen" in seen.difference("other", told(root("", LOOK)))


def test_two_ways_of_speaking_to_a_role_stay_two():
    seen = Harness()
    for text in (prompt(), "Make a short title for this conversation.", prompt("2026-12-24")):
        seen.see("main", told(root(text)))
    assert len(seen.roles["main"]) == 2
    assert seen.difference("main", told(root("Make a short title for this conversation."))) is None
    assert seen.difference("main", told(root("Make a long title for this conversation."))) is not None


WORDS = st.lists(
    st.sampled_from(["use", "the", "tools", "never", "guess", "\n", "2026-11-30", "/tmp/abc", "9f8e7d6c5b"]),
    max_size=20,
)


@given(words=WORDS)
def test_masking_is_idempotent(words):
    once = masked(" ".join(words))
    assert masked(once) == once


@given(words=st.lists(st.text("abcdef ", min_size=1, max_size=6), min_size=1, max_size=12), at=st.data())
def test_what_two_prompts_share_fits_both(words, at):
    one = " ".join(words)
    changed = list(words)
    changed[at.draw(st.integers(0, len(words) - 1))] = at.draw(st.text("xyz", min_size=1, max_size=5))
    other = " ".join(changed)
    shared = common(one, other)
    assert fits(shared, one) and fits(shared, other)
    assert common(one, one) == one and fits(one, one)
    assert not fits(one + " tail", one) or MASK in one
