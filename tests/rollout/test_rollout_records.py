"""Rollouts survive a checkpoint bit for bit."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspan.errors import CheckpointError
from inspan.rollout.records import dump_rollout, dump_task, load_rollout, load_task
from inspan.tasks.base import Task
from inspan.trace.records import Call, Node, Rollout, Session, Terminal, ToolCall, ToolEvent

text = st.text(max_size=8)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | text,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(text | st.sampled_from(["~tuple", "~dict"]) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)
rows = st.lists(st.tuples(text, text), max_size=3).map(tuple)
tasks = st.builds(
    Task,
    text,
    text,
    st.none() | text | rows,
    text,
    st.tuples(text),
    st.just(()),
    st.dictionaries(text, plain, max_size=3),
)


@st.composite
def nodes(draw):
    count = draw(st.integers(0, 5))
    tokens = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=count, max_size=count)))
    start = draw(st.integers(0, count))
    logprobs = st.lists(st.floats(allow_nan=False), min_size=count - start, max_size=count - start)
    versions = st.lists(st.integers(0, 99), min_size=count - start, max_size=count - start)
    message = {"role": "assistant", "content": draw(text), "tool_calls": [{"id": "c", "name": draw(text)}]}
    parent, fork = draw(st.none() | st.integers(0, 9)), draw(st.none() | text)
    return Node(
        draw(st.integers(0, 9)), "s", parent, message, tokens, start, tuple(draw(logprobs)), tuple(draw(versions)), fork
    )


calls = st.builds(
    Call, text, text, st.integers(0, 9), st.none(), st.none() | st.integers(0, 9), text,
    st.lists(st.builds(ToolCall, text, text, text, st.none() | text), max_size=2).map(tuple),
)  # fmt: skip
rollouts = st.builds(
    Rollout,
    id=text,
    task=tasks,
    group=text,
    member=st.integers(0, 9),
    terminal=st.sampled_from(Terminal),
    answer=st.none() | text,
    sessions=st.lists(
        st.builds(Session, text, text, text, st.booleans(), st.none() | text, st.none() | text), max_size=2
    ),
    nodes=st.lists(nodes(), max_size=3),
    calls=st.lists(calls, max_size=2),
    tool_events=st.lists(
        st.builds(
            ToolEvent, text, text, text, st.booleans(), st.floats(0, 9), text, st.dictionaries(text, plain, max_size=2)
        ),
        max_size=2,
    ),
    error=st.none() | text,
    complete=st.booleans(),
    metrics=st.dictionaries(text, st.floats(allow_nan=False), max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(rollouts)
def test_a_rollout_comes_back_bit_for_bit(rollout):
    assert repr(load_rollout(json.loads(json.dumps(dump_rollout(rollout))))) == repr(rollout)


@settings(max_examples=60, deadline=None)
@given(tasks)
def test_a_task_comes_back_as_it_was_tuples_and_all(task):
    assert repr(load_task(json.loads(json.dumps(dump_task(task))))) == repr(task)


def test_what_json_cannot_hold_is_refused_with_its_type():
    with pytest.raises(TypeError, match="set"):
        dump_task(Task("t", "p", None, meta={"x": {1}}))


def test_a_damaged_record_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="damaged"):
        load_rollout({"task": {"id": "t", "prompt": "p", "answer": None}})
    with pytest.raises(CheckpointError, match="damaged"):
        load_task({"id": "t"})
