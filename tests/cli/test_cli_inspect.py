"""`inspan inspect`: the sums of a store and the tree of a rollout, also of one that was cut off."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from test_verify import rollout

from inspan.cli.inspect import inspect
from inspan.errors import InputError, StoreError
from inspan.tasks.base import Task
from inspan.trace.records import Terminal, ToolCall
from inspan.trace.store import TraceStore


@pytest.fixture
def run(tmp_path):
    """A run with a finished rollout, a failed one, and one that was cut off."""
    with TraceStore(tmp_path / "trace.sqlite") as store:
        made = rollout(id="a", task=Task("t", "q", "a"))
        made.calls[0] = replace(made.calls[0], tool_calls=(ToolCall("c1", "look", "{", "not JSON"),))
        store.save(made)
        store.save(rollout(id="b", task=Task("t", "q", "a"), terminal=Terminal.INFRASTRUCTURE))
        cut = rollout(id="c")
        store.commit_call("c", cut.calls[0], cut.nodes[:2], cut.sessions[:1])
    return tmp_path


def test_the_sums_say_how_calls_went_on_and_what_became_of_every_token(run, capsys):
    inspect(run, rollout=None, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["rollouts"] == {"completed": 1, "infrastructure": 1, "unfinished": 1}
    assert found["continued"]["main"] == {"calls": 7, "exact": 5 / 7, "fork:sampled again": 2 / 7}
    assert found["continued"]["help"] == {"calls": 2, "exact": 1.0}
    assert found["delivery"] == {
        "sampled": 8, "trained": 4, "delivered_fraction": 1.0, "unexplained_tokens": 0,
        "excluded_tokens": {"no reward": 4},
    }  # fmt: skip
    assert found["tool_calls"] == {"all": 1, "invalid": {"not JSON": 1}}
    assert found["tokens"]["processed"] > found["tokens"]["unique"]


def test_the_text_names_rates_and_losses(run, capsys):
    inspect(run, rollout=None, as_json=False)
    out = capsys.readouterr().out
    assert "main: 7 calls: exact 71.4 %, fork:sampled again 28.6 %" in out
    assert "delivered  100.00 %: 4 of 8 sampled tokens" in out and "unexplained 0" in out


def test_a_rollout_is_a_tree_of_messages(run, capsys):
    inspect(run, rollout="a", as_json=False)
    out = capsys.readouterr().out
    assert "help: help, policy@v0, frozen, for c1 of main" in out
    assert "<fork: sampled again>  (stop)" in out and out.index("  3 assistant") < out.index("  4 assistant")


def test_what_is_no_run_or_no_rollout_is_told(run, tmp_path):
    with pytest.raises(InputError, match="no trace store"):
        inspect(tmp_path / "nowhere", rollout=None, as_json=False)
    with pytest.raises(StoreError, match="there is no rollout 'z'"):
        inspect(run, rollout="z", as_json=False)
