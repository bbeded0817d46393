"""Answers of model servers: whatever JSON comes, a message to go on from or an error of the engine's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inspan.errors import EngineError
from inspan.harness.replies import read_message

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
IDS = st.none() | st.sampled_from(["a", "b", "call_0", "call_1", ""]) | st.integers()
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.text(max_size=5)}, optional={"arguments": JSON})},
    optional={"id": IDS},
)


def answer(message):
    return {"choices": [{"message": message}]}


@given(reply=JSON | JSON.map(answer) | st.fixed_dictionaries({"tool_calls": JSON, "content": JSON}).map(answer))
def test_any_json_is_a_message_or_an_engine_error(reply):
    try:
        kept = read_message(reply, "here")
    except EngineError as error:
        assert error.where == "here"
    else:
        assert kept["role"] == "assistant" and isinstance(kept["content"], str)


@given(calls=st.lists(CALL, min_size=1, max_size=5))
def test_every_call_has_an_id_of_its_own_and_arguments_as_text(calls):
    kept = read_message(answer({"content": None, "tool_calls": calls}), "here")["tool_calls"]
    names = [call["id"] for call in kept]
    assert len(set(names)) == len(calls) and all(isinstance(name, str) and name for name in names)
    assert all(isinstance(call["function"]["arguments"], str) for call in kept)
    first = {call["id"]: at for at, call in reversed(list(enumerate(calls))) if isinstance(call.get("id"), str)}
    assert all(kept[at]["id"] == name for name, at in first.items() if name)


def test_parts_of_text_are_put_together():
    parts = [{"type": "text", "text": "a"}, {"type": "refusal"}, {"type": "text", "text": "b"}]
    assert read_message(answer({"content": parts}), "here")["content"] == "ab"
    with pytest.raises(EngineError, match="can be read"):
        read_message(answer({"content": [{"type": "text"}]}), "here")
