"""The detectors see the swarm's failures and leave a healthy run alone."""

from __future__ import annotations

from typing import Any

import pytest
from making import Maker, solo, swarm

from inspan.rewards.detectors import DETECTORS, Row, detect, observe
from inspan.tasks.base import Task
from inspan.trace.chains import trained_chains
from inspan.trace.records import ChainCredit, Rollout, Scored

WIDE, NARROW = Task("w", "?", "an answer", "wide"), Task("n", "?", "an answer", "narrow")


def row(rollouts: list[Rollout], **options: Any) -> dict[str, float]:
    return observe([[Scored(rollout, 1.0) for rollout in rollouts]], [], **options)


def names(window: list[Row]) -> list[str]:
    return [finding.name for finding in detect(window)]


def serial(assigned: int, *, answer: str = "an answer", same: bool = False) -> Rollout:
    """Sub-tasks assigned one after the other, in the same words if `same`."""
    rollout = swarm([1] * assigned, task=WIDE, answer=answer)
    if same:
        for i, call in enumerate(rollout.calls):
            tools = tuple(type(t)(t.id, t.name, "{}") for t in call.tool_calls)
            rollout.calls[i] = type(call)(call.id, call.session, call.turn, call.context, call.node, call.finish, tools)
    return rollout


def idle_swarm(size: int) -> Rollout:
    """Sub-agents that say something without having looked."""
    make = Maker()
    main = make.session()
    for call in make.turn(main, *["assign_task"] * size, ok=None):
        make.worker(main, call, turns=1)
    make.turn(main, content="an answer")
    return make.rollout(task=WIDE)


def test_a_healthy_swarm_raises_no_alarm() -> None:
    window = [row([swarm([4], task=WIDE), solo(task=NARROW)], entropy=1.0 - 0.05 * i) for i in range(9)]
    assert names(window) == []


def test_the_row_of_an_update_counts_by_kind() -> None:
    found = row([swarm([4], task=WIDE), solo(task=WIDE), swarm([2], task=NARROW), solo(task=NARROW)], entropy=0.5)
    expected = {"wide_parallel_rate": 0.5, "narrow_multi_spawn": 0.5, "spawn_rate": 0.5, "spawned": 1.5, "entropy": 0.5}
    assert {key: found[key] for key in expected} == expected
    assert found["repeat_rate"] == 0.0 and found["tiny_share"] == 0.0
    assert observe([], []) == {}


def test_serial_collapse_is_seen_when_wide_tasks_are_worked_on_alone() -> None:
    window = [row([swarm([4], task=WIDE)])] * 3 + [row([solo(task=WIDE)])] * 3
    assert names(window) == ["serial_collapse"]
    assert names([row([solo(task=NARROW)])] * 6) == [], "narrow tasks are not worth a sub-agent"


def test_spurious_parallelism_is_seen_on_narrow_tasks_and_in_idle_sub_agents() -> None:
    assert names([row([swarm([3], task=NARROW)])] * 6) == ["spurious_parallelism"]
    (finding,) = detect([row([idle_swarm(4)])] * 6)
    assert finding.name == "spurious_parallelism"
    assert finding.evidence["finish_rate"] == 0.0 and finding.evidence["spawn_rate"] == 1.0


def test_spawn_farming_is_seen_when_more_sub_tasks_bring_no_gain() -> None:
    growing = [row([swarm([3 + i], task=WIDE, answer="an answer" if i < 3 else "wrong")]) for i in range(9)]
    assert names(growing) == ["spawn_farming"]
    useful = [row([swarm([1 + i], task=WIDE, answer="wrong" if i < 3 else "an answer")]) for i in range(9)]
    assert "spawn_farming" not in names(useful)


@pytest.mark.parametrize("rollout", [serial(6), swarm([3, 3], task=WIDE)])
def test_spawn_farming_is_serial_or_in_the_same_words(rollout: Rollout) -> None:
    assert ("spawn_farming" in names([row([rollout])] * 6)) == (rollout.calls[0].tool_calls[1:] == ())
    assert "spawn_farming" in names([row([serial(4, same=True)])] * 6)
    assert row([serial(4, same=True)])["repeat_rate"] == 0.75


def test_tiny_differences_are_seen_where_advantages_outgrow_rewards() -> None:
    def window(spread: float, lift: float) -> list[Row]:
        group = [Scored(solo(), 0.5), Scored(solo(), 0.5 + spread)]
        credits = []
        for i, sign in enumerate((-0.5, 0.5)):
            (chain,) = trained_chains(group[i].rollout)
            mask = [float(on) for on in chain.trained]
            credits.append(ChainCredit(chain, tuple(sign * spread * lift * on for on in mask), tuple(mask), i, 0))
        return [observe([group], credits)] * 3

    assert names(window(0.01, 200.0)) == ["tiny_differences"]
    assert names(window(0.01, 1.0)) == [], "group_mean keeps them tiny"
    assert names(window(0.4, 5.0)) == [], "a large difference may weigh much"


def test_entropy_collapse_is_seen() -> None:
    assert names([{"entropy": 1.0}] * 3 + [{"entropy": 0.1}] * 3) == ["entropy_collapse"]
    assert names([{"entropy": 1.0}] * 3 + [{"entropy": 0.6}] * 3) == []


def test_short_or_bare_windows_say_nothing_and_findings_carry_their_evidence_and_remedy() -> None:
    for window in ([], [{}], [{"entropy": 1.0}, {"entropy": 0.0}], [{}] * 9):
        assert names(window) == []
    (finding,) = detect([row([solo(task=WIDE)])] * 3)
    assert finding.evidence["wide_parallel_rate"] == 0.0 and "r_parallel" in finding.remedy
    assert finding.name in DETECTORS
