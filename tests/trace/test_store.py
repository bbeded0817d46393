"""The store keeps what it acknowledged, once and exactly, and says clearly what is wrong with a file."""

from __future__ import annotations

import json
import math
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import Maker, solo, swarm

from inspan.errors import StoreError
from inspan.trace import packing
from inspan.trace.records import Call, Node, Scored, Session, Terminal, ToolCall, ToolEvent
from inspan.trace.store import SCHEMA_VERSION, CallRecord, TraceStore

MAIN = Session("s", "main", "policy", True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traces.db"


def sampled(id_: int, parent: int | None = None, text: str = "hello") -> Node:
    return Node(id_, "s", parent, {"role": "assistant", "content": text}, (5, 6, 70000), 1, (-0.1, -2.0 / 3.0), (3, 4))


def call(id_: str, node: int | None = None) -> Call:
    return Call(id_, "s", 0, None, node, "stop", (ToolCall("t", "search", "{", "not JSON"),), 3, 2, error="e")


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.floats(width=64)), st.lists(st.integers(-1, 2**40)))
def test_packed_arrays_come_back_bit_for_bit(tokens: list[int], floats: list[float], versions: list[int]) -> None:
    assert packing.unpack_tokens(packing.pack_tokens(tokens)) == tuple(tokens)
    assert packing.unpack_versions(packing.pack_versions(versions)) == tuple(versions)
    back = packing.unpack_floats(packing.pack_floats(floats))
    assert [math.copysign(1, x) for x in back if x == x] == [math.copysign(1, x) for x in floats if x == x]
    assert all(a == b or (a != a and b != b) for a, b in zip(back, floats, strict=True))


@pytest.mark.parametrize("tokens", [[-1], [2**32]])
def test_a_token_id_that_cannot_be_packed_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token id"):
        packing.pack_tokens(tokens)


def test_packing_is_narrow_where_that_is_exact() -> None:
    assert len(packing.pack_tokens(range(1000))) == 2001
    assert len(packing.pack_floats([-0.5] * 1000)) == 4001
    assert len(packing.pack_floats([-0.1] * 1000)) == 8001
    assert len(packing.pack_versions([7] * 1000)) < 20


def test_a_running_rollout_can_be_read_back(path: Path) -> None:
    root, child = MAIN, Session("c", "subagent", "policy@v0", False, "s", "t")
    context = Node(0, "s", None, {"role": "system", "content": "\ud800 ok", "tools": [{"a": [1, 2]}]}, (1, 2), 2)
    forked = replace(sampled(1, 0), fork="assistant edited")
    with TraceStore(path) as store:
        store.begin("r", group="g")
        store.open_session("r", root)
        store.commit_call("r", call("k", 1), [context, forked], [child])
        assert store.load("r") == ([root, child], [context, forked], [call("k", 1)])
        assert [row[:3] for row in store.rollouts()] == [("r", "g", None)]


def test_calls_come_back_in_the_order_of_their_commits(path: Path) -> None:
    with TraceStore(path) as store:
        for name in ("z", "a", "m"):
            store.commit_call("r", call(name))
        assert [c.id for c in store.load("r").calls] == ["z", "a", "m"]


def test_a_finished_rollout_comes_back_as_it_was(path: Path) -> None:
    rollout = swarm([2, 3], attempt=1, error="text", fingerprint="f", version_started=3, metrics={"x": 0.1})
    rollout.tool_events.append(ToolEvent("s0", "c", "search", False, 0.25, "timeout", {"k": [1]}))
    with TraceStore(path) as store:
        for session in rollout.sessions:
            store.open_session("r", session)
        store.commit_call("r", rollout.calls[0], rollout.nodes)
        for one in rollout.calls[1:]:
            store.commit_call("r", one)
        store.finish(rollout)
        assert store.load_rollout("r", rollout.task) == rollout
        assert store.load_rollout("r").task["prompt"] == "a question"
        with pytest.raises(StoreError, match="no rollout 'other'"):
            store.load("other")


def test_a_whole_rollout_can_be_saved_at_once(path: Path) -> None:
    rollout = solo()
    with TraceStore(path) as store:
        store.save(rollout)
    with TraceStore(path, "FULL", create=False) as store:
        assert store.load_rollout("r", rollout.task) == rollout


def test_a_rollout_has_one_terminal_state(path: Path) -> None:
    rollout = solo()
    with TraceStore(path) as store:
        store.finish(rollout)
        for late in (
            lambda: store.finish(replace(rollout, terminal=Terminal.FAILED)),
            lambda: store.commit_call("r", call("late")),
            lambda: store.open_session("r", MAIN),
            lambda: store.discard("r"),
        ):
            with pytest.raises(StoreError, match="already ended as 'completed'"):
                late()
        assert store.rollouts()[0].terminal is Terminal.COMPLETED
        assert store.load("r").calls == []


def test_a_failed_commit_leaves_nothing_behind_and_the_store_usable(path: Path) -> None:
    with TraceStore(path) as store:
        store.commit_call("r", call("a", 0), [sampled(0)])
        with pytest.raises(StoreError, match="recorded before"):
            store.commit_call("r", call("b", 1), [sampled(1), sampled(0)])
        with pytest.raises(StoreError, match="recorded before"):
            store.commit_call("r", call("a", 1), [sampled(1)])
        with pytest.raises(StoreError, match="cannot be written"):
            store.commit_call("r", call("b"), [replace(sampled(1), message={"content": object()})])
        store.commit_call("r", call("b", 1), [sampled(1)])
        assert [node.id for node in store.load("r").nodes] == [0, 1]
        assert [c.id for c in store.load("r").calls] == ["a", "b"]


def test_calls_committed_together_stand_or_fall_alone(path: Path) -> None:
    with TraceStore(path) as store:
        store.finish(solo(id="over"))
        records = [
            CallRecord("a", call("a", 0), [sampled(0)], [MAIN]),
            CallRecord("over", call("late")),
            CallRecord("b", call("b"), [replace(sampled(0), message={"content": object()})]),
            CallRecord("c", call("c", 0), [sampled(0, text="\ud800")]),
        ]
        faults = store.commit_calls(records)
        assert [None if fault is None else fault.what for fault in faults] == [
            None,
            "rollout 'over' already ended as 'completed' and takes no more records",
            "a record cannot be written or read: TypeError('object cannot be stored as JSON')",
            None,
        ]
        assert store.load("a") == ([MAIN], [sampled(0)], [call("a", 0)])
        assert store.load("c").nodes == [sampled(0, text="\ud800")]
        assert [row.id for row in store.rollouts()] == ["over", "a", "c"]


def test_a_fault_of_the_file_is_that_of_every_call(path: Path) -> None:
    with TraceStore(path, timeout_s=0.01) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        faults = store.commit_calls([CallRecord("a", call("a")), CallRecord("b", call("b"))])
        assert all("another process holds the store" in str(fault) for fault in faults)
        other.close()
        assert store.commit_calls([CallRecord("a", call("a"))]) == [None]


def test_a_discarded_rollout_starts_anew_under_its_id(path: Path) -> None:
    with TraceStore(path) as store:
        store.discard("unknown")
        store.begin("r", group="g")
        store.open_session("r", MAIN)
        store.commit_call("r", call("a", 0), [sampled(0)])
        store.discard("r")
        assert store.load("r") == ([], [], [])
        store.open_session("r", MAIN)
        store.commit_call("r", call("a", 0), [sampled(0)])
        assert [row.id for row in store.rollouts()] == ["r"]


def test_scores_keep_none_apart_from_zero(path: Path) -> None:
    rollouts = [solo(id=f"r{i}") for i in range(3)]
    given_ = [Scored(rollouts[0], None, {"f1": None}), Scored(rollouts[1], 0.0, {"f1": 0.0}, {0: -0.1, 3: 0.5})]
    with TraceStore(path) as store:
        for rollout in rollouts:
            store.finish(replace(rollout, sessions=[], nodes=[], calls=[]))
        store.save_scored(given_)
        back = [store.load_scored(f"r{i}") for i in range(3)]
        assert back[2] is None
        assert [(one.reward, one.terms, one.turn_rewards) for one in back if one] == [
            (None, {"f1": None}, {}),
            (0.0, {"f1": 0.0}, {0: -0.1, 3: 0.5}),
        ]
        with pytest.raises(StoreError, match="never finished"):
            store.save_scored([Scored(solo(id="other"), 1.0)])


def test_no_rollout_is_trained_twice_unless_the_run_goes_back(path: Path) -> None:
    with TraceStore(path) as store:
        for i in range(4):
            store.finish(solo(id=f"r{i}"))
        store.mark_trained(["r0"], 0)
        store.mark_trained(["r1", "r2"], 1)
        with pytest.raises(StoreError, match="'r1' was trained before"):
            store.mark_trained(["r3", "r1"], 2)
        assert [row.trained for row in store.rollouts()] == [0, 1, 1, None]
        assert store.rewind(1) == ["r1", "r2"]
        store.mark_trained(["r1", "r3"], 1)
        assert [row.trained for row in store.rollouts()] == [0, 1, None, 1]


def test_threads_and_a_second_reader_see_whole_calls(path: Path) -> None:
    store = TraceStore(path)

    def write(name: str) -> None:
        for i in range(20):
            store.commit_call(name, call(f"{i}", i), [sampled(i)])

    threads = [threading.Thread(target=write, args=(f"r{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    with TraceStore(path, create=False) as reader:
        for row in reader.rollouts():
            _, nodes, calls = reader.load(row.id)
            assert len(nodes) >= len(calls)
    for thread in threads:
        thread.join()
    assert [len(store.load(f"r{n}").calls) for n in range(4)] == [20] * 4
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.rollouts()


def test_a_reader_sees_one_moment_though_a_call_is_committed_while_it_reads(path: Path) -> None:
    with TraceStore(path) as writer, TraceStore(path) as reader:
        writer.commit_call("r", call("a", 0), [sampled(0)])

        def meanwhile(sql: str) -> None:
            if "FROM calls" in sql:
                writer.commit_call("r", call("b", 1), [sampled(1)])

        reader._db.set_trace_callback(meanwhile)
        _, nodes, calls = reader.load("r")
        assert (len(nodes), len(calls)) == (1, 1)
        reader._db.set_trace_callback(None)
        assert len(reader.load("r").calls) == 2


def test_a_rollout_that_runs_has_no_record_yet(path: Path) -> None:
    with TraceStore(path) as store:
        store.begin("r")
        with pytest.raises(StoreError, match="has not finished"):
            store.load_rollout("r")


# ---- faults of the file -----------------------------------------------------------------------------------------


def test_a_file_that_is_no_database_is_named(path: Path) -> None:
    path.write_bytes(b"not a database at all, but long enough to be read as a header" * 20)
    with pytest.raises(StoreError, match=r"traces\.db: the file is corrupt or not a trace store"):
        TraceStore(path)


def test_another_programs_database_is_left_alone(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    db.commit()
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a trace store"):
        TraceStore(path)
    assert path.read_bytes() == before


def test_another_schema_version_is_refused(path: Path) -> None:
    TraceStore(path).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match=f"schema version 99, this Inspan reads {SCHEMA_VERSION}"):
        TraceStore(path)


def test_a_damaged_page_is_a_clear_error(path: Path) -> None:
    with TraceStore(path) as store:
        for i in range(50):
            store.commit_call("r", call(f"{i}", i), [sampled(i, text="x" * 2000)])
    data = bytearray(path.read_bytes())
    data[4096 * 5 :] = bytes(random.Random(0).randbytes(len(data) - 4096 * 5))
    path.write_bytes(data)
    with pytest.raises(StoreError, match="corrupt"), TraceStore(path) as store:
        store.load("r")


def test_a_missing_store_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no trace store"):
        TraceStore(tmp_path / "x.db", create=False)
    with pytest.raises(StoreError, match="cannot be opened"):
        TraceStore(tmp_path / "no" / "x.db")
    with pytest.raises(StoreError, match="synchronous"):
        TraceStore(tmp_path / "x.db", "OFF")  # type: ignore[arg-type]


def test_a_store_that_another_process_holds_is_a_clear_error(path: Path) -> None:
    with TraceStore(path, timeout_s=0.01) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process holds the store"):
            store.commit_call("r", call("a"))
        other.execute("ROLLBACK")
        other.close()
        store.commit_call("r", call("a"))


FULL_DISK = """
import resource, sys
from inspan.errors import StoreError
from inspan.trace.records import Call
from inspan.trace.store import TraceStore
store = TraceStore(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
done = 0
try:
    while done < 10_000:
        store.commit_call("r", Call(f"{done}", "s", 0, None, None, "stop", error="x" * 3000))
        done += 1
except StoreError as error:
    print(done, len(store.load("r").calls), error)
"""


def test_a_full_disk_is_a_clear_error_and_loses_nothing(path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    done, kept, message = run.stdout.split(maxsplit=2)
    assert 0 < int(done) == int(kept)
    assert "disk" in message and "traces.db" in message
    with TraceStore(path) as store:
        assert len(store.load("r").calls) == int(done)


# ---- kill -9 ----------------------------------------------------------------------------------------------------

WRITER = """
import sys
from inspan.trace.records import Call, Node, Rollout, Session, Terminal
from inspan.trace.store import TraceStore
store = TraceStore(sys.argv[1])
print("ready", flush=True)
for r in range(10_000):
    name = f"r{r}"
    store.open_session(name, Session("s", "main", "policy", True))
    for c in range(3):
        text = {"role": "x", "content": "y" * 500}
        nodes = [Node(c * 4 + k, "s", None, text, (r, c, k), 2, (-0.5,), (r,)) for k in range(4)]
        store.commit_call(name, Call(f"c{c}", "s", c, None, c * 4 + 3, "stop"), nodes)
        print(name, c, flush=True)
    store.finish(Rollout(name, None, "g", 0, Terminal.COMPLETED, "a", [], [], []))
    print(name, "end", flush=True)
"""


@pytest.mark.parametrize("seed", range(8))
def test_what_was_acknowledged_survives_kill_9(path: Path, seed: int) -> None:
    lines_before_kill = random.Random(seed).randrange(1, 400)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    lines = [writer.stdout.readline() for _ in range(lines_before_kill)]
    writer.send_signal(signal.SIGKILL)
    lines += writer.stdout.readlines()
    writer.wait()
    check_kept(path, [line.split() for line in lines if line.endswith("\n")])


def check_kept(path: Path, told: list[list[str]]) -> None:
    with TraceStore(path, create=False) as store:
        ends = {row.id: row.terminal for row in store.rollouts()}
        for name, what in told:
            sessions, _, calls = store.load(name)
            if what == "end":
                assert ends[name] is Terminal.COMPLETED
            else:
                assert sessions and len(calls) > int(what)
        for name in ends:  # whole calls only, acknowledged or not
            _, nodes, calls = store.load(name)
            assert [node.id for node in nodes] == list(range(4 * len(calls)))
            assert all(node.tokens == (int(name[1:]), node.id // 4, node.id % 4) for node in nodes)
        for name, end in ends.items():  # and the store goes on
            if end is None:
                store.discard(name)
                store.commit_call(name, call("new"))
        check = sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone()[0]
        assert check == "ok"


def test_records_are_plain_json_that_other_programs_can_read(path: Path) -> None:
    make = Maker()
    make.turn(make.session(), "search")
    with TraceStore(path) as store:
        store.save(make.rollout())
    row = sqlite3.connect(path).execute("SELECT data FROM calls").fetchone()[0]
    assert json.loads(row)["tool_calls"][0]["name"] == "search"
