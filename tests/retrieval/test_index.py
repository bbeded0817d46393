"""A corpus on disk: whatever was added and removed, it is the index that would be built anew."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys

import bm25s
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inspan.cli.index import index as command
from inspan.errors import CorpusError, InputError
from inspan.retrieval.bm25 import terms
from inspan.retrieval.chunks import spans, tokens
from inspan.retrieval.corpus import Document
from inspan.retrieval.index import Index, update
from inspan.retrieval.readers import Skipped, from_html, from_manual, read_document

WORDS = ["Niger", "Nigeria", "Niamey", "capital", "river", "oxen", "yoke", "Zürich", "1960", "the"]
TEXTS = st.lists(st.sampled_from([*WORDS, ".", "\n", "\n\n", " ", "—", "\t"]), max_size=60).map(" ".join)


# ---- chunks -----------------------------------------------------------------------------------------------------


@given(text=TEXTS | st.text(max_size=200), most=st.integers(1, 30))
def test_chunks_are_the_text_cut_within_the_limit(text, most):
    found = list(spans(text, most))
    assert "".join(text[a:b] for a, b in found) == text
    assert all(tokens(text[a:b]) <= most for a, b in found) and all(a < b for a, b in found)


def test_chunks_end_at_paragraphs_while_they_fit():
    text = "One two three.\n\nFour five.\n\nSix seven eight nine. Ten eleven twelve thirteen fourteen.\n"
    assert [text[a:b] for a, b in spans(text, 7)] == [
        "One two three.\n\nFour five.\n\n", "Six seven eight nine. ", "Ten eleven twelve thirteen fourteen.\n",
    ]  # fmt: skip


# ---- the index --------------------------------------------------------------------------------------------------


def make(rng, count=12):
    return [Document(f"d{i:02}", " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))) for i in range(count)]


def content(folder):
    index = Index(folder)
    whole = [(chunk, hit.score) for word in WORDS for hit in index.search(word, 50) for chunk in [hit.chunk]]
    index.close()
    return whole


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_added_and_removed_it_is_what_would_be_built_anew(seed, tmp_path_factory):
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("index")
    documents = make(rng)
    update(folder / "a", documents[:5], most=8)
    update(folder / "a", documents[3:], remove=["d01"])
    changed = Document("d07", "the yoke of the oxen")
    change = update(folder / "a", [changed], remove=["d02", "d03"])
    assert (change.added, change.removed) == (1, 2)
    left = [changed if one.id == "d07" else one for one in documents if one.id not in ("d01", "d02", "d03")]
    rng.shuffle(left)
    update(folder / "b", left, most=8)
    assert content(folder / "a") == content(folder / "b")


def test_the_ranking_is_bm25s_and_ties_stand_in_the_order_of_the_corpus(tmp_path):
    documents = make(random.Random(1), 40)
    update(tmp_path, documents, most=1000)
    peer = bm25s.BM25(method="lucene")
    vocabulary: dict[str, int] = {}
    ids = [[vocabulary.setdefault(t, len(vocabulary)) for t in terms(f"{d.id}\n{d.text}")] for d in documents]
    peer.index((ids, vocabulary), show_progress=False)
    index = Index(tmp_path)
    for query in ("Niger river", "oxen yoke the", "Zürich"):
        scores = peer.get_scores_from_ids([vocabulary[t] for t in dict.fromkeys(terms(query)) if t in vocabulary])
        expected = sorted((-float(score), at) for at, score in enumerate(scores) if score > 0)[:10]
        found = index.search(query, 10)
        assert [
            (hit.chunk.document, pytest.approx(-score)) for hit, (score, _) in zip(found, expected, strict=True)
        ] == [(documents[at].id, hit.score) for hit, (_, at) in zip(found, expected, strict=True)]


def test_what_was_seen_is_not_found_again_and_the_rest_moves_up(tmp_path):
    update(tmp_path, make(random.Random(2), 20), most=8)
    index = Index(tmp_path)
    whole = [hit.chunk.id for hit in index.search("Niger oxen", 100)]
    seen = whole[:4]
    assert [hit.chunk.id for hit in index.search("Niger oxen", 5, exclude=seen)] == whole[4:9]
    assert not set(seen) & {hit.chunk.id for hit in index.grep("oxen|Niger", 100, exclude=seen)}


def test_documents_and_chunks_by_their_ids(tmp_path):
    text = "One two three four.\n\nFive six seven eight.\n"
    update(tmp_path, [Document("a/b.txt", text)], most=5)
    index = Index(tmp_path)
    chunks = index.document("a/b.txt")
    assert "".join(chunk.text for chunk in chunks) == text and [chunk.start for chunk in chunks] == [0, 21]
    assert index.chunk("a/b.txt#1") == chunks[1] and chunks[1].tokens == 5
    for ask in (index.document, index.chunk):
        with pytest.raises(InputError, match=r"no (document|chunk) nothing"):
            ask("nothing")


@pytest.mark.parametrize("query", ["", "   ", "?!", "x" * 100_000, "Niger " * 20_000, "\udcff \0"])
def test_any_query_is_answered(tmp_path, query):
    update(tmp_path, make(random.Random(3)))
    assert isinstance(Index(tmp_path).search(query, 5), list)


def test_patterns_take_linear_time_and_bad_ones_are_told(tmp_path):
    update(tmp_path, [Document("a", "a" * 50_000 + "!")], most=100_000)
    index = Index(tmp_path)
    assert index.grep("(a+)+$", 5) == [] and len(index.grep("a!", 5)) == 1
    for bad in ("(", "[", "(?<=a)b", "a{5000}{5000}"):
        with pytest.raises(InputError, match="bad pattern"):
            index.grep(bad, 5)


# ---- faults -----------------------------------------------------------------------------------------------------


def test_faults_of_a_corpus_are_told_and_the_index_stays(tmp_path):
    with pytest.raises(CorpusError, match="the corpus is empty"):
        update(tmp_path, [])
    update(tmp_path, [Document("a", "Niger")])
    for put, remove, expected in (
        ([Document("b", "x"), Document("b", "y")], [], "two documents are called 'b'"),
        ([], ["c"], "no document 'c'"),
        ([], ["a"], "the corpus is empty"),
    ):
        with pytest.raises(CorpusError, match=expected):
            update(tmp_path, put, remove=remove)
        assert [hit.chunk.document for hit in Index(tmp_path).search("Niger", 5)] == ["a"]


def test_no_index_another_version_and_damage_are_told(tmp_path):
    with pytest.raises(CorpusError, match="there is no index"):
        Index(tmp_path)
    update(tmp_path, [Document("a", "Niger")])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for change, expected in (
        ({"version": 2}, "made otherwise"), ({"terms": "others"}, "made otherwise"),
        ({"generation": "g9"}, "damaged"), ({"chunks": 7}, "damaged"),
    ):  # fmt: skip
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(CorpusError, match=expected) as caught:
            Index(tmp_path)
        assert "inspan index" in str(caught.value)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / manifest["generation"] / "data.csc.index.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(CorpusError, match="damaged"):
        Index(tmp_path)


BUILD = """
import os, signal, sys
from inspan.retrieval import index
from inspan.retrieval.corpus import Document
calls = [0]
def dying(name, plain):
    def act(*args, **options):
        calls[0] += 1
        if calls[0] == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*args, **options)
    return act
import bm25s
bm25s.BM25.save = dying("save", bm25s.BM25.save)
index.os.replace = dying("replace", index.os.replace)
index.shutil.rmtree = dying("rmtree", index.shutil.rmtree)
from pathlib import Path
index.update(Path(sys.argv[1]), [Document("b", "Niamey")])
"""


@pytest.mark.parametrize("at", range(1, 5))
def test_killed_while_it_is_changed_the_old_index_or_the_new_one_is_there(tmp_path, at):
    update(tmp_path, [Document("a", "Niger")])
    ended = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path), str(at)], check=False)
    assert ended.returncode == -signal.SIGKILL
    found = {word: [hit.chunk.document for hit in Index(tmp_path).search(word, 5)] for word in ("Niger", "Niamey")}
    assert found["Niger"] == ["a"] and found["Niamey"] in ([], ["b"])
    update(tmp_path, [Document("b", "Niamey")])
    assert [hit.chunk.document for hit in Index(tmp_path).search("Niamey", 5)] == ["b"]


# ---- files ------------------------------------------------------------------------------------------------------

PAGE = (
    "<html><head><title>Niger</title><style>x{}</style></head><body><nav>Home</nav><h1>Niger&amp;Co</h1>"
    "<p>The capital\n is <b>Niamey</b>.</p><script>evil()</script><table><tr><td>area</td><td>1</td></tr></table>"
    "<pre>a\n  b</pre></body></html>"
)
MAN = (
    '.\\" comment\n.TH YOKE 1 "2026"\n.SH NAME\nyoke \\- put \\fIoxen\\fR in harness\n.SH OPTIONS\n.TP\n.BR \\-v ", " '
    "\\-\\-verbose\nSay \\(aqmore\\(aq.\n.de XX\n.PP\nThe end.\n"
)


def test_html_and_manual_pages_become_paragraphs():
    text = from_html(PAGE)
    assert "Niger&Co\n\nThe capital is Niamey.\n\n" in text and "evil" not in text and "x{}" not in text
    assert "area 1" in text and "a\n  b" in text
    page = from_manual(MAN)
    assert "NAME\n\nyoke - put oxen in harness\n" in page and "-v, --verbose\nSay 'more'." in page
    assert "comment" not in page and "\\" not in page


def test_a_folder_is_indexed_and_brought_up_to_date(tmp_path, capsys):
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "a.md").write_text("# Niger\n\nThe capital is Niamey.")
    (corpus / "deep" / "b.html").write_text(PAGE)
    (corpus / "yoke.1.gz").write_bytes(gzip.compress(MAN.encode()))
    (corpus / "c.rst").write_bytes(b"caf\xe9")
    (corpus / "d.txt").write_bytes(b"\0\1\2")
    (corpus / "e.bin").write_bytes(b"x")
    (corpus / "f.2.gz").write_bytes(b"\x1f\x8bbroken")
    (corpus / "g.pdf").write_bytes(b"%PDF-broken")
    command(corpus, out=tmp_path / "index", chunk_tokens=64)
    told = capsys.readouterr()
    assert "3 documents (3 new or changed, 0 removed)" in told.out
    for reason in ("not UTF-8 (byte 3)", "binary", "unknown ending .bin", "damaged gzip", "damaged PDF"):
        assert reason in told.err
    index = Index(tmp_path / "index")
    assert [hit.chunk.document for hit in index.search("oxen harness", 1)] == ["yoke.1.gz"]
    (corpus / "a.md").write_text("# Chad\n\nThe capital is N'Djamena.")
    (corpus / "deep" / "b.html").unlink()
    command(corpus, out=tmp_path / "index", chunk_tokens=64)
    assert "2 documents (1 new or changed, 1 removed)" in capsys.readouterr().out
    assert Index(tmp_path / "index").search("Niamey", 5) == []
    shutil.rmtree(corpus)
    corpus.mkdir()
    with pytest.raises(CorpusError, match="the corpus is empty"):
        command(corpus, out=tmp_path / "index", chunk_tokens=64)
    assert len(Index(tmp_path / "index").search("Djamena", 5)) == 1


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(Skipped, match="no text"):
        read_document(tmp_path / "empty.txt")
    assert os.listdir(tmp_path) == ["empty.txt"]
