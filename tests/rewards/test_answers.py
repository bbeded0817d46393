"""Answers are read as people mean them and scored cell by cell."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from making import solo

from inspan.errors import TaskError
from inspan.rewards.exact_match import is_exact, row_accuracy
from inspan.rewards.item_f1 import ItemScore, item_score, score_items
from inspan.rewards.tables import normalise, parse_table
from inspan.tasks.base import Task

COLUMNS = ("country", "capital", "currency")
TRUTH = (("Niger", "Niamey", "CFA franc"), ("Nigeria", "Abuja", "naira"), ("Chad", "N'Djamena", "CFA franc"))
WIDE = Task("w", "?", TRUTH, "wide", COLUMNS, ("country",))
FULL = "\n".join(" | ".join(row) for row in TRUTH)


def score(answer: str | None, task: Task = WIDE) -> ItemScore:
    found = item_score(solo(task=task, answer=answer))
    assert found is not None
    return found


# ---- reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        FULL,
        FULL.upper(),
        "\n".join(f"| {row.strip()} |" for row in FULL.splitlines()),
        "Here is the table:\n\n```\n" + FULL + "\n```\nI hope it helps.",
        "| Country | Capital | Currency |\n|---|:---:|--:|\n" + FULL,
        "  Niger|Niamey  |CFA   franc \n\n Nigeria |Abuja| naira\nChad | **N'Djamena** | `CFA franc`.",
        "capital | currency | country\n" + "\n".join(f"{b} | {c} | {a}" for a, b, c in TRUTH),
        "\n".join(reversed(FULL.splitlines())),
    ],
)
def test_a_right_table_is_right_however_it_is_laid_out(text: str) -> None:
    assert score(text) == ItemScore(1.0, 1.0, 1.0)
    assert is_exact(solo(task=WIDE, answer=text)) is True
    assert row_accuracy(solo(task=WIDE, answer=text)) == 1.0


def test_a_table_of_one_column_needs_no_bars() -> None:
    task = Task("l", "?", (("a",), ("b",)), columns=("name",))
    assert score("name\na\n| b |\n", task).f1 == 1.0


def test_an_escaped_bar_and_an_empty_cell_stay_in_their_cell() -> None:
    assert parse_table(r"| a \| b |  | c |") == [("a | b", "", "c")]
    assert parse_table("a |  | ") == [("a", "", "")]


@pytest.mark.parametrize(
    ("one", "other"),
    [("1,234,567", "1234567"), ("12.50", "12.5"), ("+49", "49"), ("-0", "0"), ("3.0", "3"), ("ﬁve", "FIVE")],
)
def test_numbers_and_letters_have_one_form(one: str, other: str) -> None:
    assert normalise(one) == normalise(other)


@pytest.mark.parametrize(
    ("one", "other"), [("1,23", "123"), ("007", "7"), ("a b", "ab"), ("1-684", "1684"), ("é", "e")]
)
def test_what_differs_stays_different(one: str, other: str) -> None:
    assert normalise(one) != normalise(other)


@given(st.text())
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normalise(normalise(text)) == normalise(text)


@given(st.text(alphabet='a|\\-: \n`"1.', max_size=60), st.sampled_from([(), ("a",), ("a", "b")]))
def test_whatever_a_model_writes_can_be_read(text: str, columns: tuple[str, ...]) -> None:
    assert all(row for row in parse_table(text, columns))


# ---- scoring ----------------------------------------------------------------------------------------------------


def test_each_wrong_missing_and_made_up_cell_costs() -> None:
    assert score("Niger | Niamey | naira\nNigeria | Abuja | naira\nChad | N'Djamena | CFA franc").f1 == pytest.approx(
        5 / 6
    )
    two_rows = score("Niger | Niamey | CFA franc\nNigeria | Abuja | naira")
    assert two_rows == pytest.approx((1.0, 4 / 6, 0.8))
    made_up = score(FULL + "\nMali | Bamako | CFA franc")
    assert made_up == pytest.approx((6 / 8, 1.0, 6 / 7))


def test_rows_are_aligned_on_their_keys_not_on_their_place() -> None:
    assert score("Nigeria | Niamey | CFA franc").precision == 0.0


def test_keys_alone_and_repeated_rows_do_not_pay() -> None:
    keys = "\n".join(row[0] + " |" for row in TRUTH)
    assert score(keys) == (0.0, 0.0, 0.0)
    assert score(FULL + "\n" + FULL) == pytest.approx((0.5, 1.0, 2 / 3))


@pytest.mark.parametrize("answer", [None, "", "I do not know", "|||", "---|---|---"])
def test_no_table_is_zero(answer: str | None) -> None:
    assert score(answer) == ItemScore(0.0, 0.0, 0.0)
    assert row_accuracy(solo(task=WIDE, answer=answer)) == 0.0
    assert is_exact(solo(task=WIDE, answer=answer)) is False


def test_a_string_answer_is_right_or_wrong() -> None:
    task = Task("n", "?", "CFA franc")
    assert score("  cfa  FRANC. ", task).f1 == 1.0
    assert score("naira", task).f1 == 0.0
    assert score(None, task).f1 == 0.0
    assert row_accuracy(solo(task=task, answer="cfa franc")) == 1.0


def test_exact_is_all_rows_and_row_accuracy_its_share() -> None:
    partly = solo(task=WIDE, answer=FULL.replace("naira", "cedi"))
    assert is_exact(partly) is False and row_accuracy(partly) == 2 / 3
    more = solo(task=WIDE, answer=FULL + "\nMali | Bamako | CFA franc")
    assert is_exact(more) is False and row_accuracy(more) == 1.0


def test_a_task_without_truth_has_no_score_and_a_wrong_key_is_named() -> None:
    rollout = solo(task=Task("x", "?", None))
    assert (item_score(rollout), is_exact(rollout), row_accuracy(rollout)) == (None, None, None)
    with pytest.raises(TaskError, match="key 'land' is no column"):
        score(FULL, Task("x", "?", TRUTH, columns=COLUMNS, keys=("land",)))


cells = st.sampled_from("abc")
tables = st.lists(st.tuples(cells, cells, cells), max_size=5)


def naive(predicted: list[tuple[str, ...]], truth: list[tuple[str, ...]]) -> tuple[float, float, float]:
    """Item F1 by trying every way of aligning rows with equal keys (the first two cells)."""

    def best(left: list[tuple[str, ...]], right: list[tuple[str, ...]]) -> int:
        if not left:
            return 0
        row, rest = left[0], left[1:]
        hits = best(rest, right)
        for i, true in enumerate(right):
            if row[:2] == true[:2]:
                same = int(row[2] == true[2])
                hits = max(hits, same + best(rest, right[:i] + right[i + 1 :]))
        return hits

    if not predicted and not truth:
        return 1.0, 1.0, 1.0
    hits = best(predicted, truth)
    precision = hits / len(predicted) if predicted else 0.0
    recall = hits / len(truth) if truth else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall) if hits else 0.0


@given(tables, tables.map(lambda rows: list({row[:2]: row for row in rows}.values())))
def test_item_f1_is_the_naive_reference(predicted: list[tuple[str, ...]], truth: list[tuple[str, ...]]) -> None:
    found, expected = score_items(predicted, truth, [0, 1]), naive(predicted, truth)
    repeated = len({row[:2] for row in predicted}) < len(predicted)
    if repeated:  # which of several rows with one key is aligned is the first one's turn: never better than the best
        assert found.f1 <= expected[2] + 1e-12
    else:
        assert found == pytest.approx(expected)


@given(tables, st.integers(0, 2**16))
def test_the_order_of_rows_never_matters(rows: list[tuple[str, ...]], seed: int) -> None:
    truth = list({row[:2]: row for row in rows}.values())
    shuffled = random.Random(seed).sample(truth, len(truth))
    assert score_items(shuffled, truth, [0, 1]).f1 == 1.0
