"""Every row is in one micro-batch, budgets hold, and each shared prefix is laid out once."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_fakes import make_credit

from inspan.errors import InspanError
from inspan.learner.packing import Row, make_row, pack, plan, unique_tokens

token_rows = st.lists(st.lists(st.integers(0, 2), max_size=8).map(tuple), max_size=12)


def rows_of(tokens):
    """Rows in which every token but the first is trained."""
    return [Row(t, tuple(range(1, len(t)))) for t in tokens]


def size_of(rows):
    return len(pack(rows).tokens)


@given(token_rows, st.integers(1, 40))
def test_every_row_is_in_exactly_one_micro_batch_and_the_budget_holds(tokens, budget):
    rows = rows_of(tokens)
    batches = plan(rows, budget)
    assert sorted(i for b in batches for i in b) == [i for i, t in enumerate(tokens) if t]
    for batch in batches:
        assert len(batch) == 1 or size_of([rows[i] for i in batch]) <= budget
    for batch, following in pairwise(batches):  # and no micro-batch is closed early
        assert size_of([rows[i] for i in (*batch, following[0])]) > budget


@given(token_rows.map(lambda rows: [r for r in rows if r]).filter(bool))
def test_a_packed_tree_holds_each_prefix_once_and_every_row_can_be_read_off_it(tokens):
    rows = rows_of(tokens)
    packed = pack(rows)
    assert len(packed.tokens) == unique_tokens(tokens)
    starts = [0, *accumulate(segment.length for segment in packed.segments)]
    assert starts[-1] == len(packed.tokens)
    inside = {}  # flat position → flat positions of the path down to it
    for number, segment in enumerate(packed.segments):
        assert all(above < number for above in segment.above)
        path = [i for n in (*segment.above, number) for i in range(starts[n], starts[n + 1])]
        assert [packed.depths[i] for i in path] == list(range(len(path)))
        inside |= {i: path[: depth + 1] for depth, i in enumerate(path) if i >= starts[number]}
    targets = [(row, p) for row in rows for p in row.positions]
    for (row, position), context, label in zip(targets, packed.contexts, packed.labels, strict=True):
        assert label == row.tokens[position]
        assert tuple(packed.tokens[i] for i in inside[context]) == row.tokens[:position]


def test_a_long_line_of_forks_is_no_recursion():
    rows = rows_of([tuple(range(n)) for n in range(1, 3000, 2)])
    assert size_of(rows) == 2999


@given(st.lists(st.lists(st.integers(0, 2), max_size=8).map(tuple), max_size=12))
def test_unique_tokens_counts_distinct_prefixes(rows):
    assert unique_tokens(rows) == len({row[: i + 1] for row in rows for i in range(len(row))})


def test_a_row_ends_at_the_last_trained_token_and_holds_each_once():
    credit = make_credit(np.random.default_rng(0), rollout=0, group=0, length=20)
    row = make_row(credit)
    assert row.positions == tuple(i for i, t in enumerate(credit.chain.trained) if t)
    assert len(row.tokens) == row.positions[-1] + 1


@pytest.mark.parametrize("fault", ["short", "negative", "frozen", "first"])
def test_a_faulty_credit_is_refused_and_named(fault):
    credit = make_credit(np.random.default_rng(0), rollout=2, group=1, length=20)
    weights = list(credit.weights)
    if fault == "short":
        weights.pop()
    else:
        weights[{"negative": 3, "frozen": 1, "first": 0}[fault]] = -1.0 if fault == "negative" else 1.0
    credit.weights = tuple(weights)
    if fault == "first":
        from dataclasses import replace

        credit.chain = replace(credit.chain, trained=(True, *credit.chain.trained[1:]))
    with pytest.raises(InspanError, match="group 1, rollout 2"):
        make_row(credit)
