"""The durable trace store. Contract: what a method returned from is on disk and survives `kill -9`.

One SQLite file in WAL mode. Each method is one transaction: after a crash a call is there with all its nodes, or not at
all. `synchronous="NORMAL"` survives the death of the process; `"FULL"` also that of the machine, at one fsync a commit.

Invariants
- A rollout id has at most one terminal state, for ever (`finish`); a sealed rollout takes no more calls.
- A node, a call and a session are written once and never changed.
- Log-probs and token ids come back bit for bit.
- A rollout is trained at most once (`mark_trained`); `rewind` undoes the marks that a resumed run is about to repeat.

Calls come back in the order of their commits: commit them in the order in which `Rollout.calls` lists them.
Every fault of the file is a `StoreError`; a failed commit is rolled back whole, and the store stays usable.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from inspan.errors import StoreError
from inspan.trace.records import Call, ChainCredit, Node, Rollout, Scored, Session, Terminal, ToolEvent
from inspan.trace.store_rows import (
    PUT_CALL,
    PUT_NODE,
    Credit,
    call_of,
    call_row,
    credit_rows,
    credits_of,
    fields,
    is_record,
    node_of,
    node_row,
    to_json,
)

SCHEMA_VERSION = 2
_APPLICATION = 0x494E5350  # "INSP"
_SCHEMA = """
CREATE TABLE rollouts (key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, "group" TEXT NOT NULL DEFAULT '',
    terminal TEXT, record TEXT, scored TEXT, trained INTEGER);
CREATE TABLE sessions (rollout INTEGER NOT NULL, id TEXT NOT NULL, data TEXT NOT NULL, UNIQUE (rollout, id));
CREATE TABLE nodes (rollout INTEGER NOT NULL, id INTEGER NOT NULL, session TEXT NOT NULL, parent INTEGER,
    message TEXT NOT NULL, tokens BLOB NOT NULL, start INTEGER NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL,
    fork TEXT, UNIQUE (rollout, id));
CREATE TABLE calls (rollout INTEGER NOT NULL, id TEXT NOT NULL, data TEXT NOT NULL, UNIQUE (rollout, id));
"""
_GRANTS = """CREATE TABLE grants (rollout TEXT NOT NULL UNIQUE, key BLOB NOT NULL UNIQUE, terms TEXT NOT NULL,
    sealed INTEGER NOT NULL DEFAULT 0)"""


class Stored(NamedTuple):
    """What was recorded of one rollout: sessions and calls in the order of their commits, nodes by id."""

    sessions: list[Session]
    nodes: list[Node]
    calls: list[Call]


class CallRecord(NamedTuple):
    """A call of a rollout, with the nodes and sessions that it brought."""

    rollout: str
    call: Call
    nodes: Sequence[Node] = ()
    sessions: Sequence[Session] = ()


class GrantRow(NamedTuple):
    """A grant at rest."""

    rollout: str
    terms: Mapping[str, Any]
    sealed: bool


class LedgerRow(NamedTuple):
    """Where a rollout stands. `terminal` None: still running, or cut off by a crash. `trained`: the update, or None."""

    id: str
    group: str
    terminal: Terminal | None
    scored: bool
    trained: int | None


class TraceStore:
    """A store at `path` (created if missing unless `create=False`). Safe to use from several threads.

    Raises `StoreError` when the file cannot be opened, is no store, is corrupt, locked, or of another schema version.
    """

    def __init__(
        self,
        path: str | Path,
        synchronous: Literal["NORMAL", "FULL"] = "NORMAL",
        *,
        create: bool = True,
        timeout_s: float = 5.0,
    ) -> None:
        self.path = str(path)
        self._lock = threading.RLock()
        if synchronous not in ("NORMAL", "FULL"):
            raise StoreError(f"synchronous is {synchronous!r}", where=self.path, hint='use "NORMAL" or "FULL"')
        if not create and not Path(path).is_file():
            raise StoreError("there is no trace store", where=self.path, hint="give the path of a run's traces")
        with self._faults():
            self._db = sqlite3.connect(self.path, timeout=timeout_s, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(synchronous)
        except BaseException:
            self._db.close()
            raise

    # ---- recording: called by the gateway ----------------------------------------------------------------------

    def begin(self, rollout: str, *, group: str = "") -> None:
        """Enter a dispatched rollout in the ledger. Entering it again is harmless; recording does it by itself."""
        with self._transaction() as db:
            self._enter(db, rollout, group)

    def open_session(self, rollout: str, session: Session) -> None:
        """Record a new session of a rollout; a second one of the same id is a `StoreError`."""
        with self._transaction() as db:
            self._put_session(db, self._open_key(db, rollout), session)

    def commit_call(
        self, rollout: str, call: Call, new_nodes: Sequence[Node] = (), new_sessions: Sequence[Session] = ()
    ) -> None:
        """Record a call with the nodes (and sessions) that it brought, all or nothing. On return it is durable.

        A sealed rollout, or a call or node id recorded before, is a `StoreError`.
        """
        with self._transaction() as db:
            self._put_calls(db, [CallRecord(rollout, call, new_nodes, new_sessions)])

    def commit_calls(self, records: Sequence[CallRecord]) -> list[StoreError | None]:
        """`commit_call` for several rollouts in one transaction, which costs little more than one; the fault of each.

        A call that is refused does not touch the others; a fault of the file is everyone's.
        """
        try:
            with self._transaction() as db:
                self._put_calls(db, records)
        except StoreError as error:
            if len(records) == 1 or isinstance(error.__cause__, sqlite3.OperationalError):
                return [error] * len(records)
            return [fault for record in records for fault in self.commit_calls([record])]
        return [None] * len(records)

    # ---- the ledger: called by the dispatcher and the trainer ---------------------------------------------------

    def finish(self, rollout: Rollout) -> None:
        """Seal a rollout with its terminal state, answer, tool events and metrics (not its graph).

        A rollout that already has a terminal state is a `StoreError`: each has exactly one.
        """
        with self._transaction() as db:
            self._finish(db, self._open_key(db, rollout.id), rollout)

    def save(self, rollout: Rollout) -> None:
        """Record a whole finished rollout with its graph in one transaction (for traces that came another way)."""
        with self._transaction() as db:
            key = self._open_key(db, rollout.id)
            for session in rollout.sessions:
                self._put_session(db, key, session)
            db.executemany(PUT_NODE, [node_row(key, node) for node in rollout.nodes])
            db.executemany(PUT_CALL, [call_row(key, call) for call in rollout.calls])
            self._finish(db, key, rollout)

    def discard(self, rollout: str) -> None:
        """Forget what an unfinished rollout recorded, so that it can be started anew under its id.

        A finished rollout is a `StoreError`; an unknown one is left unknown.
        """
        with self._transaction() as db:
            if self._row(db, rollout) is None:
                return
            key = self._open_key(db, rollout)
            for table in ("sessions", "nodes", "calls"):
                db.execute(f"DELETE FROM {table} WHERE rollout = ?", (key,))

    def save_scored(
        self, scored: Iterable[Scored], credits: Mapping[str, Sequence[ChainCredit]] = MappingProxyType({})
    ) -> None:
        """Record rewards and terms of finished rollouts, all or nothing; scoring again replaces the score.

        `credits`: by rollout, the chains that are learned from, with their advantages and weights.
        """
        with self._transaction() as db:
            for one in scored:
                turns = {str(turn): value for turn, value in one.turn_rewards.items()}
                told = {"reward": one.reward, "terms": one.terms, "turn_rewards": turns}
                if one.rollout.id in credits:
                    told["credits"] = credit_rows(credits[one.rollout.id])
                text = to_json(told)
                found = db.execute(
                    "UPDATE rollouts SET scored = ? WHERE id = ? AND terminal IS NOT NULL", (text, one.rollout.id)
                )
                if found.rowcount != 1:
                    raise self._error(f"rollout {one.rollout.id!r} is scored but was never finished", "finish it first")

    def mark_trained(self, rollouts: Iterable[str], update: int) -> None:
        """Mark rollouts as trained in an update, all or none; one that was trained before is a `StoreError`."""
        with self._transaction() as db:
            for rollout in rollouts:
                done = db.execute(
                    "UPDATE rollouts SET trained = ? WHERE id = ? AND trained IS NULL AND terminal IS NOT NULL",
                    (update, rollout),
                )
                if done.rowcount != 1:
                    raise self._error(
                        f"rollout {rollout!r} was trained before, or never finished", "rewind to the checkpoint first"
                    )

    def rewind(self, update: int) -> list[str]:
        """Take back the marks of all updates from `update` on (0-based); returns the ids that are untrained again."""
        with self._transaction() as db:
            ids = [row[0] for row in db.execute("SELECT id FROM rollouts WHERE trained >= ? ORDER BY key", (update,))]
            db.execute("UPDATE rollouts SET trained = NULL WHERE trained >= ?", (update,))
            return ids

    # ---- grants: called by a gateway that outlives its process --------------------------------------------------

    def put_grant(self, rollout: str, key: bytes, terms: Mapping[str, Any]) -> None:
        """Keep what the key with this hash allows, and enter its rollout. A rollout that has one is a `StoreError`."""
        with self._transaction() as db:
            self._enter(db, rollout, "")
            db.execute("INSERT INTO grants (rollout, key, terms) VALUES (?,?,?)", (rollout, key, to_json(terms)))

    def grant(self, key: bytes) -> GrantRow | None:
        """The grant of a key's hash, or None."""
        with self._reading() as db:
            row = db.execute("SELECT rollout, terms, sealed FROM grants WHERE key = ?", (key,)).fetchone()
        return None if row is None else GrantRow(row[0], json.loads(row[1]), bool(row[2]))

    def open_grants(self) -> list[tuple[str, bytes]]:
        """Rollouts whose grants are not sealed, with the hashes of their keys, in the order of opening."""
        with self._reading() as db:
            return db.execute("SELECT rollout, key FROM grants WHERE NOT sealed ORDER BY rowid").fetchall()

    def seal_grant(self, rollout: str) -> None:
        """Mark a grant as used up; harmless for a rollout that has none."""
        with self._transaction() as db:
            db.execute("UPDATE grants SET sealed = 1 WHERE rollout = ?", (rollout,))

    # ---- reading ------------------------------------------------------------------------------------------------

    def rollouts(self) -> list[LedgerRow]:
        """The ledger, in the order of dispatch."""
        with self._reading() as db:
            rows = db.execute('SELECT id, "group", terminal, scored, trained FROM rollouts ORDER BY key').fetchall()
        return [
            LedgerRow(id_, group, None if end is None else Terminal(end), scored is not None, trained)
            for id_, group, end, scored, trained in rows
        ]

    def load(self, rollout: str) -> Stored:
        """What was recorded of a rollout so far, finished or not; an unknown rollout is a `StoreError`."""
        with self._reading() as db:
            key = self._known(db, rollout)[0]
            sessions = db.execute("SELECT data FROM sessions WHERE rollout = ? ORDER BY rowid", (key,)).fetchall()
            nodes = db.execute("SELECT * FROM nodes WHERE rollout = ? ORDER BY id", (key,)).fetchall()
            calls = db.execute("SELECT data FROM calls WHERE rollout = ? ORDER BY rowid", (key,)).fetchall()
            return Stored(
                [Session(**json.loads(row[0])) for row in sessions],
                [node_of(row) for row in nodes],
                [call_of(row[0]) for row in calls],
            )

    def has_call(self, rollout: str, call: str) -> bool:
        """Whether a call of a rollout is on disk."""
        query = "SELECT 1 FROM calls JOIN rollouts ON rollout = key WHERE rollouts.id = ? AND calls.id = ?"
        with self._reading() as db:
            return db.execute(query, (rollout, call)).fetchone() is not None

    def load_rollout(self, rollout: str, task: Any = None) -> Rollout:
        """A finished rollout as it was. `task` is put in its place; without it the task is the mapping stored of it."""
        with self._reading() as db:
            key, terminal, _ = self._known(db, rollout)
            if terminal is None:
                raise self._error(f"rollout {rollout!r} has not finished", "use load() for what it recorded so far")
            text = db.execute("SELECT record FROM rollouts WHERE key = ?", (key,)).fetchone()[0]
            record = json.loads(text)
        stored = self.load(rollout)  # sealed above: it cannot have changed
        stored_task = record.pop("task")
        record["terminal"] = Terminal(record["terminal"])
        record["tool_events"] = [ToolEvent(**event) for event in record["tool_events"]]
        return Rollout(task=stored_task if task is None else task, **stored._asdict(), **record)

    def load_scored(self, rollout: str, task: Any = None) -> Scored | None:
        """A rollout with its score, or None when it has not been scored."""
        with self._reading() as db:
            row = self._known(db, rollout)
            text = row[2]
        if text is None:
            return None
        data = json.loads(text)
        turns = {int(turn): value for turn, value in data["turn_rewards"].items()}
        return Scored(self.load_rollout(rollout, task), data["reward"], data["terms"], turns)

    def load_credits(self, rollout: str) -> dict[int, Credit]:
        """What the chains of a rollout were trained with, by their leaf's node id; those that were not are left out."""
        with self._reading() as db:
            text = self._known(db, rollout)[2]
            return credits_of(json.loads(text or "{}").get("credits", ()))

    def close(self) -> None:
        """Close the file; the log is folded into it. Closing twice is harmless."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> TraceStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _prepare(self, synchronous: str) -> None:
        with self._faults():
            found = self._db.execute("PRAGMA application_id").fetchone()[0]
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if tables and found != _APPLICATION:
                raise self._error("this SQLite file is not a trace store", "give another path")
            if tables and version == 1:  # it only lacks the grants
                self._upgrade()
            elif tables and version != SCHEMA_VERSION:
                raise self._error(
                    f"the store has schema version {version}, this Inspan reads {SCHEMA_VERSION}",
                    "export it with the version that wrote it, or start a new run directory",
                )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA synchronous = {synchronous}")
            self._db.execute("PRAGMA wal_autocheckpoint = 4000")
        if not tables:
            self._create()

    def _create(self) -> None:
        with self._transaction() as db:
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                return  # another process was faster
            for statement in (*_SCHEMA.split(";"), _GRANTS):
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {_APPLICATION}")
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _upgrade(self) -> None:
        with self._transaction() as db:
            if db.execute("PRAGMA user_version").fetchone()[0] == 1:  # else another process was faster
                db.execute(_GRANTS)
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _row(self, db: sqlite3.Connection, rollout: str) -> tuple[int, str | None, str | None] | None:
        return db.execute("SELECT key, terminal, scored FROM rollouts WHERE id = ?", (rollout,)).fetchone()

    def _known(self, db: sqlite3.Connection, rollout: str) -> tuple[int, str | None, str | None]:
        row = self._row(db, rollout)
        if row is None:
            raise self._error(f"there is no rollout {rollout!r}", "rollouts() lists those that there are")
        return row

    def _enter(self, db: sqlite3.Connection, rollout: str, group: str) -> None:
        db.execute('INSERT OR IGNORE INTO rollouts (id, "group") VALUES (?,?)', (rollout, group))

    def _open_key(self, db: sqlite3.Connection, rollout: str) -> int:
        """The key of a rollout that may still be written to; a new one is entered."""
        row = self._row(db, rollout)
        if row is None:
            self._enter(db, rollout, "")
            return self._known(db, rollout)[0]
        if row[1] is not None:
            raise self._error(
                f"rollout {rollout!r} already ended as {row[1]!r} and takes no more records",
                "a rollout has one terminal state; use a new id",
            )
        return row[0]

    def _put_calls(self, db: sqlite3.Connection, records: Sequence[CallRecord]) -> None:
        nodes, calls = [], []
        for rollout, call, new_nodes, new_sessions in records:
            key = self._open_key(db, rollout)
            for session in new_sessions:
                self._put_session(db, key, session)
            nodes += [node_row(key, node) for node in new_nodes]
            calls.append(call_row(key, call))
        db.executemany(PUT_NODE, nodes)
        db.executemany(PUT_CALL, calls)

    def _put_session(self, db: sqlite3.Connection, key: int, session: Session) -> None:
        db.execute("INSERT INTO sessions VALUES (?,?,?)", (key, session.id, to_json(fields(session))))

    def _finish(self, db: sqlite3.Connection, key: int, rollout: Rollout) -> None:
        record = {name: value for name, value in fields(rollout).items() if name not in Stored._fields}
        record["task"] = dataclasses.asdict(rollout.task) if is_record(rollout.task) else rollout.task
        record["tool_events"] = [fields(event) for event in rollout.tool_events]
        db.execute(
            'UPDATE rollouts SET terminal = ?, record = ?, "group" = ? WHERE key = ?',
            (str(rollout.terminal), to_json(record), rollout.group, key),
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._faults():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """One snapshot for all statements, whatever another process commits meanwhile."""
        with self._lock, self._faults():
            self._db.execute("BEGIN")
            try:
                yield self._db
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._explain(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._error(
                f"a record cannot be written or read: {error!r}", "the record is at fault, or the file"
            ) from error

    def _explain(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if isinstance(error, sqlite3.IntegrityError):
            return self._error(f"this was recorded before ({text})", "each id is recorded once in a rollout")
        for fragment, what, hint in _FAULTS:
            if fragment in text:
                return self._error(f"{what} ({text})", hint)
        return self._error(f"the trace store failed: {text}", "see the message; the last commit was not made")

    def _error(self, what: str, hint: str) -> StoreError:
        return StoreError(what, where=self.path, hint=hint)


_FAULTS = (
    ("disk is full", "the disk is full", "free some space; nothing committed so far is lost"),
    ("disk I/O error", "the disk cannot be written", "check space, quota and the file system; commits so far are kept"),
    ("locked", "another process holds the store", "wait for it, or stop the run that writes it"),
    ("readonly", "the store is read-only", "make the file and its directory writable"),
    ("not a database", "the file is corrupt or not a trace store", "restore a copy, or start a new run directory"),
    ("malformed", "the store is corrupt", "restore a copy, or start a new run directory"),
    ("unable to open", "the store cannot be opened", "does its directory exist, and may you write there?"),
    ("closed", "the store is closed", "open it again"),
)
