"""Parity: equal settings have equal fingerprints, and a mismatch is refused by name."""

from __future__ import annotations

import json

import pytest

from inspan.errors import InputError
from inspan.rollout.fingerprint import Fingerprint, fingerprint, require_same

BASE = {
    "harness": "swarm",
    "version": "abc",
    "renderer": "chatml",
    "limits": {"critical_steps": 14, "tokens": None},
    "system_prompt": "You answer.",
    "tools": [{"type": "function", "function": {"name": "search"}}],
}


def test_the_order_of_keys_does_not_matter():
    other = BASE | {
        "limits": {"tokens": None, "critical_steps": 14},
        "tools": [{"function": {"name": "search"}, "type": "function"}],
    }
    assert fingerprint(**BASE).hash == fingerprint(**other).hash


@pytest.mark.parametrize(
    "change",
    [
        {"harness": "single"},
        {"version": "abd"},
        {"renderer": "template"},
        {"limits": {"critical_steps": 15, "tokens": None}},
        {"system_prompt": "You answer"},
        {"tools": []},
    ],
)
def test_every_part_counts_and_a_mismatch_names_it(change):
    ours, theirs = fingerprint(**BASE), fingerprint(**(BASE | change))
    assert ours.hash != theirs.hash
    with pytest.raises(InputError, match=next(iter(change))):
        require_same(ours, theirs, what="serving")
    require_same(ours, ours, what="serving")


def test_parts_come_back_from_json():
    ours = fingerprint(**BASE)
    assert Fingerprint.from_parts(json.loads(json.dumps(ours.parts))).hash == ours.hash
    with pytest.raises(InputError, match="no fingerprint"):
        Fingerprint.from_parts({"tools": []})
