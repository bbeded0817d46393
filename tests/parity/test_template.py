"""Templates: what several prompts share, with holes where they differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspan.parity.template import HOLE, fits, widened

WORDS = st.sampled_from(
    ["You", "are", "an", "agent", "fix", "the", "bug", "12", "17", ".", "\n", " ", "  ", "cwd:", "ab"]
)
TEXTS = st.lists(WORDS, max_size=30).map(" ".join)
STABLE = "You are a careful agent.\nYou fix bugs in a repository and explain what you did.\nUse at most 20 calls.\n"


def folded(texts: list[str]) -> str:
    template = texts[0]
    for text in texts[1:]:
        template = widened(template, text)[0]
    return template


@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_a_template_fits_every_text_that_it_was_made_from(texts: list[str]) -> None:
    template = folded(texts)
    assert all(fits(template, text) for text in texts)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.lists(TEXTS, min_size=1, max_size=4))
def test_two_templates_joined_fit_what_each_fitted(one: list[str], other: list[str]) -> None:
    joined = widened(folded(one), folded(other))[0]
    assert all(fits(joined, text) for text in one + other)


@given(TEXTS, TEXTS)
def test_without_holes_only_the_same_text_fits(one: str, other: str) -> None:
    assert fits(one, other) == (one == other)
    assert widened(one, one) == (one, 1.0)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(STABLE.split()))
def test_what_varies_is_a_hole_and_what_is_stable_is_not(a: int, b: int, c: int, word: str) -> None:
    made = [f"{STABLE}Worker {n} of the pool.\nBe brief." for n in (a, b, c)]
    template = folded(made[:2])
    assert fits(template, made[2]) or a == b
    assert STABLE in template and template.endswith("Be brief.")
    assert not fits(template, made[0].replace(word, "other", 1))


@pytest.mark.parametrize(
    ("one", "other", "template"),
    [
        ("pid 12, port 80", "pid 13, port 81", f"pid {HOLE}, port {HOLE}"),
        ("Be good.\n", "Be good.\nNote: x\n", f"Be good.\n{HOLE}"),
        (f"a {HOLE} c", "a bb d", f"a {HOLE}"),
    ],
)
def test_where_holes_come(one: str, other: str, template: str) -> None:
    assert widened(one, other)[0] == template


def test_words_that_long_differing_stretches_share_by_chance_are_no_common_part() -> None:
    one = STABLE + "The task: find the capital of Niger and the area of the lake that lies in its east.\nBe brief."
    other = (
        STABLE + "The task: rename all files whose name has the word draft in it to final, and list them.\nBe brief."
    )
    template, kept = widened(one, other)
    assert template.startswith(STABLE) and template.endswith("\nBe brief.") and kept > 0.5
    assert template.count(HOLE) <= 3


def test_prompts_of_two_agents_share_little() -> None:
    assert widened(STABLE, "Write a title of three words for this conversation, without quotation marks.")[1] < 0.5


def test_a_prompt_of_many_words_is_compared_in_good_time() -> None:
    long = "\n".join(f"- rule {n}: do {n * 7} things before {n * 13} others" for n in range(4000))
    template, kept = widened(long, long.replace("do 700 things", "do 701 things"))
    assert template.count(HOLE) == 1 and kept > 0.99
