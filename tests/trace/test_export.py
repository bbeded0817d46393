"""Exports hold what was recorded, in both formats, or no file at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import solo, swarm

from inspan.errors import InputError, StoreError
from inspan.trace import export
from inspan.trace.chains import trained_chains
from inspan.trace.records import Chain, ChainCredit, Scored, Terminal
from inspan.trace.store import TraceStore
from inspan.trace.store_rows import credit_rows, credits_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    with TraceStore(tmp_path / "t.db") as store:
        for rollout in (swarm([2], id="a"), solo(id="b"), solo(id="c", terminal=Terminal.INFRASTRUCTURE)):
            store.save(rollout)
            reward = None if rollout.id == "c" else 0.5
            store.save_scored([Scored(rollout, reward, {"f1": reward})])
        store.begin("running")
        yield store


def read(path: Path) -> list[dict]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pyarrow.parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_training_rows_are_the_trained_chains(store: TraceStore, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    assert export.export_training(store, path) == 2
    rows = read(path)
    assert [(row["rollout"], row["reward"], json.loads(row["terms"])) for row in rows] == [
        ("a", 0.5, {"f1": 0.5}),
        ("b", 0.5, {"f1": 0.5}),
    ]
    (chain,) = trained_chains(swarm([2], id="a"))
    row = rows[0]
    assert tuple(row["tokens"]) == chain.tokens and tuple(row["mask"]) == chain.trained
    assert tuple(row["logprobs"]) == chain.logprobs and tuple(row["versions"]) == chain.versions
    assert tuple(row["turns"]) == chain.turns
    assert set(row) == set(export.TRAINING_TYPES)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_trace_rows_are_the_messages(store: TraceStore, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"out{suffix}"
    rollout = swarm([2], id="a")
    rows = [row for row in read(path) if row["rollout"] == "a"] if export.export_traces(store, path) else []
    assert [row["node"] for row in rows] == [node.id for node in rollout.nodes]
    assert [tuple(row["tokens"]) for row in rows] == [node.tokens for node in rollout.nodes]
    assert [json.loads(row["message"]) for row in rows] == [dict(node.message) for node in rollout.nodes]
    assert {row["parent_call"] for row in rows} == {None, "c0-0", "c0-1"}
    assert {row["task"] for row in rows} == {"t"}
    assert set(rows[0]) == set(export.TRACE_TYPES)


def test_an_export_is_complete_or_absent(tmp_path: Path) -> None:
    def rows() -> Iterator[dict]:
        yield from export.training_rows([export.Learned(Scored(solo(), 1.0))])
        raise RuntimeError("lost")

    for name in ("x.jsonl", "x.parquet"):
        path = tmp_path / name
        path.write_text("the export before")
        with pytest.raises(RuntimeError, match="lost"):
            export.write_rows(rows(), path, export.TRAINING_TYPES)
        assert path.read_text() == "the export before"
    assert len(list(tmp_path.iterdir())) == 2


def test_faults_are_named(store: TraceStore, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"end the file name in \.jsonl or \.parquet"):
        export.export_traces(store, tmp_path / "x.csv")
    for name in ("x.jsonl", "x.parquet"):
        with pytest.raises(StoreError, match="No such file"):
            export.export_traces(store, tmp_path / "no" / name)


def test_without_pyarrow_the_hint_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(export.importlib, "import_module", missing)
    with pytest.raises(InputError, match=r"inspan\[parquet\]"):
        export.write_rows([], tmp_path / "x.parquet", export.TRACE_TYPES)


def test_training_rows_hold_what_was_learned_with_and_when(store: TraceStore, tmp_path: Path) -> None:
    rollout = swarm([2], id="d", attempt=1, fingerprint="f00")
    (chain,) = trained_chains(rollout)
    advantages = tuple(0.1 * turn if on else 0.0 for turn, on in zip(chain.turns, chain.trained, strict=True))
    credit = ChainCredit(chain, advantages, tuple(map(float, chain.trained)), 0, 0)
    store.save(rollout)
    store.save_scored([Scored(rollout, 1.0)], {"d": [credit]})
    store.mark_trained(["b", "d"], 3)
    for name in ("x.jsonl", "x.parquet"):
        export.export_training(store, tmp_path / name)
        one, two, row = read(tmp_path / name)
        assert tuple(row["advantages"]) == advantages and tuple(row["weights"]) == credit.weights
        assert (row["update"], row["chain"], row["attempt"], row["fingerprint"]) == (3, chain.nodes[-1], 1, "f00")
        assert (one["update"], one["advantages"]) == (None, None) and (two["update"], two["weights"]) == (3, None)


def test_scoring_again_without_credits_takes_them_back(store: TraceStore) -> None:
    rollout = swarm([2], id="d")
    (chain,) = trained_chains(rollout)
    zeros = tuple(0.0 for _ in chain.tokens)
    store.save(rollout)
    store.save_scored([Scored(rollout, 1.0)], {"d": [ChainCredit(chain, zeros, zeros, 0, 0)]})
    assert store.load_credits("d") == {chain.nodes[-1]: (list(zeros), list(zeros))}
    store.save_scored([Scored(rollout, 1.0)])
    assert store.load_credits("d") == {} == store.load_credits("running")


@given(st.lists(st.tuples(st.floats(-9, 9), st.sampled_from([0.0, 1.0])), max_size=60))
def test_credits_come_back_as_they_were(pairs: list[tuple[float, float]]) -> None:
    values = [tuple(column) for column in zip(*pairs, strict=True)] or [(), ()]
    chain = Chain("s", "main", "policy", (), (), (), (), (), (7,))
    rows = json.loads(json.dumps(credit_rows([ChainCredit(chain, values[0], values[1], 0, 0)])))
    assert credits_of(rows) == {7: (list(values[0]), list(values[1]))}


@given(st.lists(st.integers(0, 600_000), max_size=8))
def test_batches_are_bounded_by_what_they_hold_and_lose_nothing(sizes: list[int]) -> None:
    rows = [{"id": at, "tokens": [0] * size} for at, size in enumerate(sizes)]
    made = list(export.batches(rows))
    assert [row["id"] for batch in made for row in batch] == list(range(len(sizes)))
    for batch in made:
        assert len(batch) == 1 or sum(len(row["tokens"]) for row in batch) <= 1_000_000
    many = list(export.batches({"id": at} for at in range(600)))
    assert [len(batch) for batch in many] == [256, 256, 88]
