"""Faces: what is the same kind of request, what is volatile between requests, and how a difference is told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspan.errors import InputError
from inspan.parity.face import Face, entered
from inspan.parity.template import HOLE

SYSTEM = "You are a careful agent that fixes bugs.\nYou explain what you did in one paragraph.\n"
SEARCH = {"type": "function", "function": {"name": "search", "description": "Find text.", "parameters": {"a": 1}}}
READ = {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": {}}}


def face(system: str = SYSTEM, tools: Any = (SEARCH, READ), sampling: Any = None, **parts: str) -> Face:
    named = {"dialect": "chat", "client": "coder/1.0"} | parts
    return Face.of(system=system, tools=tools, sampling=sampling or {}, **named)


def told(known: Face, new: Face) -> str:
    return "\n".join(known.told(new))


def test_neither_the_order_of_tools_nor_that_of_keys_matters() -> None:
    again = json.loads(json.dumps([READ, {"function": SEARCH["function"], "type": "function"}]))
    assert face() == face(tools=again) and not told(face(), face(tools=again))


def test_the_same_client_on_another_day_fits() -> None:
    one, other = (
        face(f"{SYSTEM}Today is {day}. Your directory is {place}.") for day, place in
        (("2026-12-01", "/tmp/tmpa8/work"), ("2027-01-02", "/tmp/tmpzz9/work"))
    )  # fmt: skip
    assert one.takes(other) and one == other


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"system": SYSTEM.replace("careful", "quick")},
            ["system prompt changed", "-You are a careful", "+You are a qu"],
        ),
        ({"tools": [SEARCH]}, ["tools removed: read"]),
        ({"tools": [SEARCH, READ, READ | {"name": "run"} | {"function": {"name": "run"}}]}, ["tools added: run"]),
        ({"client": "coder/1.1"}, ["client: coder/1.0 in training, coder/1.1 now"]),
        ({"dialect": "responses"}, ["dialect: chat in training, responses now"]),
        ({"sampling": {"temperature": 0.5}}, ["sampling.temperature: unset in training, 0.5 now"]),
    ],
)
def test_every_part_counts_and_a_difference_names_it(change: dict[str, Any], says: list[str]) -> None:
    known, new = face(), face(**change)
    assert not known.takes(new) and not new.takes(known)
    assert all(part in told(known, new) for part in says) and told(new, known)


def test_a_changed_description_is_shown_line_by_line() -> None:
    changed = {"type": "function", "function": SEARCH["function"] | {"description": "Find texts."}}
    text = told(face(), face(tools=[changed, READ]))
    assert "tool search changed" in text and '-  "description": "Find text."' in text and "read" not in text
    assert '+  "description": "Find texts."' in text


def test_what_differs_between_sessions_is_volatile_and_is_left_out_of_a_diff() -> None:
    faces: tuple[Face, ...] = ()
    for worker, host in (("w17", "ant"), ("w32", "bee")):
        faces = entered(faces, face(f"{SYSTEM}You run as {worker} on {host}.\nBe brief."))
    (known,) = faces
    assert known.system == f"{SYSTEM}You run as {HOLE} on {HOLE}.\nBe brief."
    assert known.takes(face(f"{SYSTEM}You run as w99 on cow.\nBe brief."))
    text = told(known, face(f"{SYSTEM}You run as w99 on cow.\nBe long."))
    assert "+Be long." in text and "w99" not in text


def test_side_requests_are_faces_of_their_own() -> None:
    title = face("Write a title of three words for this conversation.", tools=())
    faces = entered(entered(entered((), face()), title), face())
    assert faces == (face(), title)


def test_prompts_that_share_nothing_are_volatile_as_a_whole_once_there_are_many() -> None:
    faces: tuple[Face, ...] = (face(tools=()),)
    for n in range(20):
        words = " ".join(f"w{n}x{i}" for i in range(30))
        faces = entered(faces, face(words))
        assert any(one.takes(face(words)) for one in faces)
    assert len(faces) == 2 and faces[0] == face(tools=())
    assert faces[1].takes(face("something else again"))


def test_a_sampling_field_of_many_values_is_volatile_and_one_of_few_is_not() -> None:
    faces: tuple[Face, ...] = ()
    for most in range(100, 109):
        faces = entered(faces, face(sampling={"max_tokens": most, "temperature": most % 2}))
    (known,) = faces
    assert known.takes(face(sampling={"max_tokens": 7, "temperature": 1}))
    assert not known.takes(face(sampling={"max_tokens": 7, "temperature": 2}))


PROMPTS = st.builds(
    lambda name, extra: f"{SYSTEM}You are {name}.\n{extra}", st.sampled_from(["Ann", "Bo"]), st.text(max_size=30)
)
FACES = st.builds(
    face, PROMPTS, st.sampled_from([(), (SEARCH,), (SEARCH, READ)]),
    st.dictionaries(st.sampled_from(["n", "stop"]), st.integers(0, 30), max_size=2),
)  # fmt: skip


@given(st.lists(FACES, max_size=14))
def test_whatever_was_entered_fits_and_comes_back_from_json(given_faces: list[Face]) -> None:
    faces: tuple[Face, ...] = ()
    for one in given_faces:
        faces = entered(faces, one)
    again = [Face.from_json(json.loads(json.dumps(one.as_json()))) for one in faces]
    assert again == list(faces)
    assert all(any(known.takes(one) for known in faces) for one in given_faces)
    assert all(not told(one, one) for one in faces)
    assert entered(faces, given_faces[0]) == faces if given_faces else faces == ()


@given(FACES, FACES)
def test_one_request_fits_another_exactly_when_no_difference_is_told(one: Face, other: Face) -> None:
    assert one.takes(other) == (not told(one, other))
    assert one.takes(other) == (one == other)


def test_what_is_no_face_is_refused() -> None:
    with pytest.raises(InputError, match="no face"):
        Face.from_json({"dialect": "chat"})
