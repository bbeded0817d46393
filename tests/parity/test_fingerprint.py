"""Fingerprints: equal parts, equal id; who is let through, and what a refusal says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_face import READ, SEARCH, SYSTEM, face

from inspan.errors import InputError, ParityError
from inspan.parity.fingerprint import Fingerprint, read
from inspan.parity.watch import Drift, Guard, Learning, save_fingerprint

SETTING = {
    "harness": "command",
    "version": "abc",
    "renderer": {"name": "chatml", "template": "t", "tokenizer": "k"},
    "limits": {"critical_steps": 14, "tokens": None},
}


def learned(*faces) -> Learning:
    watch = Learning(Fingerprint(SETTING))
    for one in faces:
        watch.see("main", one)
    return watch


def test_equal_parts_have_equal_ids_whatever_the_order() -> None:
    other = {**SETTING, "limits": {"tokens": None, "critical_steps": 14}}
    assert Fingerprint(SETTING).id == Fingerprint(other).id
    assert learned(face(), face()).id == learned(face()).id != learned(face(tools=[READ])).id


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"harness": "swarm"}, "harness: command in training, swarm now"),
        ({"version": "abd"}, "version: abc in training, abd now"),
        ({"renderer": SETTING["renderer"] | {"template": "u"}}, "renderer.template: t in training, u now"),
        ({"limits": {"critical_steps": 15, "tokens": None}}, "limits.critical_steps: 14 in training, 15 now"),
        ({"limits": {"critical_steps": 14, "tokens": 8}}, "limits.tokens: none in training, 8 now"),
    ],
)
def test_another_setting_is_refused_before_anything_runs(change: dict, says: str) -> None:
    trained = learned(face()).fingerprint
    with pytest.raises(ParityError, match=says):
        Guard(trained, SETTING | change)
    assert Drift(trained, SETTING | change).differences == [says]
    assert Fingerprint(SETTING | change).id != Fingerprint(SETTING).id


def test_a_guard_lets_the_training_through_and_names_what_differs() -> None:
    trained = learned(face(), face("Write a title.", tools=())).fingerprint
    guard = Guard(trained, SETTING)
    guard.see("main", face())
    guard.demand()
    changed = {"type": "function", "function": SEARCH["function"] | {"description": "Find texts."}}
    with pytest.raises(ParityError, match=r"tool search changed[^$]*\+  \"description\": \"Find texts\.\"") as refused:
        guard.see("main", face(tools=[changed, READ]))
    assert trained.id in str(refused.value) and "--allow-drift" in str(refused.value)
    with pytest.raises(ParityError, match="role judge: not seen in training, which had main"):
        guard.see("judge", face())
    with pytest.raises(ParityError, match="tool search changed"):
        guard.demand()


def test_drift_that_was_allowed_is_told_once() -> None:
    drift = Drift(learned(face()).fingerprint, SETTING)
    for _ in range(2):
        drift.see("main", face())
        drift.see("main", face(client="coder/2.0"))
    drift.demand()
    assert drift.differences == ["role main: client: coder/1.0 in training, coder/2.0 now"]
    assert drift.id != learned(face()).id


def test_a_run_keeps_its_fingerprint_and_the_ids_that_its_rollouts_carry(tmp_path: Path) -> None:
    watch = learned(face(SYSTEM + "You are w1."))
    first = watch.id
    watch.see("main", face(SYSTEM + "You are w2."))
    save_fingerprint(watch, tmp_path)
    data = json.loads((tmp_path / "fingerprint.json").read_text())
    assert data["earlier"] == [first] and data["id"] == watch.id == read(tmp_path).id
    again = learned()
    assert again.restore(data) == [] and again.id == watch.id and again.earlier == watch.earlier
    other = Learning(Fingerprint(SETTING | {"version": "abd"}))
    assert other.restore(data) == ["version: abc in training, abd now"] and other.id != watch.id


def test_a_run_without_a_fingerprint_is_refused_and_a_broken_one_named(tmp_path: Path) -> None:
    with pytest.raises(ParityError, match="has no fingerprint"):
        read(tmp_path)
    for text in ("{", '{"harness": "x"}', "[]"):
        (tmp_path / "fingerprint.json").write_text(text)
        with pytest.raises(InputError, match=r"fingerprint"):
            read(tmp_path)
