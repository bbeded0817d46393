"""Corpora and search: deterministic, near names compete, and a bad document is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspan.errors import CorpusError
from inspan.retrieval.bm25 import Bm25Index, terms
from inspan.retrieval.corpus import Document, load_corpus

DOCS = [
    Document("Niger capital", "the capital of Niger is Niamey"),
    Document("Nigeria capital", "the capital of Nigeria is Abuja"),
    Document("Niger area", "the area of Niger is 1267000"),
    Document("hidden", "Niger Niger Niger capital", listed=False),
]


def test_the_best_match_is_first_and_near_names_follow() -> None:
    found = [d.id for d, _ in Bm25Index(DOCS).search("Niger capital", 3)]
    assert found[0] == "Niger capital" and "Nigeria capital" in found and "hidden" not in found


def test_no_known_term_finds_nothing() -> None:
    index = Bm25Index(DOCS)
    assert index.search("zebra", 3) == [] and index.search("?!", 3) == []
    assert Bm25Index([]).search("Niger", 3) == []


def test_ties_break_by_document_order() -> None:
    twins = [Document(str(i), "same words here") for i in range(9)]
    assert [d.id for d, _ in Bm25Index(twins).search("same words", 4)] == ["0", "1", "2", "3"]


def test_a_huge_query_is_answered() -> None:
    assert Bm25Index(DOCS).search("capital " * 50_000, 1)[0][0].id in {"Niger capital", "Nigeria capital"}


@given(st.lists(st.text(max_size=30), max_size=6), st.text(max_size=60), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_search_never_raises_and_is_sorted(texts: list[str], query: str, count: int) -> None:
    index = Bm25Index([Document(str(i), text) for i, text in enumerate(texts)])
    scores = [score for _, score in index.search(query, count)]
    assert len(scores) <= count and scores == sorted(scores, reverse=True) and all(s > 0 for s in scores)


def test_terms_have_beginnings() -> None:
    assert terms("Niger, Oman 12345") == ["niger", "oman", "12345", "nige~"]


def test_folders_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("# A")
    (tmp_path / "b.txt").write_text("bé")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    assert [(d.id, d.text) for d in load_corpus(tmp_path)] == [("b.txt", "bé"), ("sub/a.md", "# A")]
    lines = tmp_path / "d.jsonl"
    lines.write_text(json.dumps({"id": "x", "text": "hello"}) + "\n\n" + json.dumps({"text": "no id"}))
    assert [d.id for d in load_corpus(lines)] == ["x", "3"]


def test_bad_corpora_are_named(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no such file"):
        load_corpus(tmp_path / "none")
    with pytest.raises(CorpusError, match="empty"):
        load_corpus(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(CorpusError, match=r"latin\.txt: not UTF-8"):
        load_corpus(tmp_path)
    lines = tmp_path / "d.jsonl"
    lines.write_text('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}')
    with pytest.raises(CorpusError, match="two documents"):
        load_corpus(lines)
    lines.write_text('{"id": 1, "text": "a"}\n{"body": "b"}')
    with pytest.raises(CorpusError, match=r"d\.jsonl:2"):
        load_corpus(lines)
    for name in ("null", "true", '""', "[1]"):
        lines.write_text(f'{{"id": {name}, "text": "a"}}')
        with pytest.raises(CorpusError, match="id is"):
            load_corpus(lines)
    lines.write_text("{")
    with pytest.raises(CorpusError, match="not JSON"):
        load_corpus(lines)
