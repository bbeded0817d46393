"""Every row is in one micro-batch, budgets hold, the plan is the cheapest, and repeated prefixes are counted."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import make_credit

from inspan.errors import InspanError
from inspan.learner.packing import make_row, padded_tokens, plan, unique_tokens


@given(st.lists(st.integers(0, 60), max_size=40), st.integers(1, 200), st.integers(0, 100))
def test_every_row_is_in_exactly_one_micro_batch_and_the_budget_holds(lengths, budget, overhead):
    batches = plan(lengths, budget, overhead=overhead)
    assert sorted(i for b in batches for i in b) == [i for i, n in enumerate(lengths) if n > 0]
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(20, 90), st.integers(0, 40))
@settings(max_examples=60)
def test_no_cut_of_the_sorted_rows_is_cheaper(lengths, budget, overhead):
    def cost(batches):
        return padded_tokens(lengths, batches) + overhead * len(batches)

    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    cheapest = None
    for count in range(len(order)):
        for cuts in combinations(range(1, len(order)), count):
            edges = [0, *cuts, len(order)]
            batches = [order[a:b] for a, b in pairwise(edges)]
            if all(len(b) == 1 or len(b) * lengths[b[0]] <= budget for b in batches):
                cheapest = min(cost(batches), cheapest if cheapest is not None else cost(batches))
    assert cost(plan(lengths, budget, overhead=overhead)) == cheapest


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
