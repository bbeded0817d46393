"""The report is one page that holds everything, and nothing that a model wrote can act in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from inspan.errors import InputError, StoreError
from inspan.report import build

from . import synthetic


class Page(HTMLParser):
    """Collects tags, attributes and text; checks that tags are balanced."""

    VOID = ("meta", "br", "img", "link", "input", "hr")
    LEAF = ("rect", "line", "circle", "polyline")  # closed by themselves in SVG

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture
def run(tmp_path):
    return synthetic.write_run(tmp_path / "run")


def page_of(run):
    return Page(build(run).read_text(encoding="utf-8"))


def test_shows_arms_kinds_curves_trajectories_and_recipe(run):
    page = page_of(run)
    text = " ".join(page.text)
    for wanted in (
        "warm start",
        "single agent",
        "trained",
        "0.780",
        "narrow",
        "7 min 11 s",
        "1.59 GiB",
        "Trajectories",
    ):
        assert wanted in text
    titles = {a["aria-label"] for a in page.named("svg") if "aria-label" in a}
    assert {"Reward", "Item F1", "Reward terms", "Weights of the terms", "Parallel width", "Critical steps"} <= titles
    assert {"Entropy", "Ratio", "Clipped and masked", "Staleness", "Tokens a second", "Dropped groups"} <= titles
    assert {"Share of None", "unheard_of", "timeline over critical steps"} <= titles


def test_loads_nothing_from_outside(run):
    html = build(run).read_text(encoding="utf-8")
    page = Page(html)
    for _, attrs in page.tags:
        assert not {"src", "href", "srcset", "action", "onload", "onclick", "style"} & set(attrs)
    assert not re.search(r"@import|url\(", html)


def test_its_policy_allows_its_own_script_and_style_alone(run):
    html = build(run).read_text(encoding="utf-8")
    policy = next(a["content"] for a in Page(html).named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    for tag in ("script", "style"):
        source = re.search(f"<{tag}>(.*?)</{tag}>", html, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\x00\u202e\ud800"


def test_what_a_model_writes_stays_text(run):
    item = synthetic.trajectory(2, text=HOSTILE, arm_name=HOSTILE)
    item["task"]["prompt"] = item["task"]["kind"] = item["terminal"] = item["answer"] = HOSTILE
    item["task"]["answer"] = [[HOSTILE]]
    item["terms"] = {HOSTILE: 1.0}
    for session in item["sessions"]:
        session["agent"] = session["policy"] = HOSTILE
        session["messages"].append({"role": HOSTILE, "content": HOSTILE})
        session["messages"].append(
            {"role": "assistant", "tool_calls": [{"id": "q", "name": HOSTILE, "arguments": HOSTILE}]}
        )
    (run / "trajectories.jsonl").write_text(json.dumps(item) + "\n")
    metric = {"update": 41, f"terms/{HOSTILE}": 1.0, HOSTILE: 2.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metric) + "\n")
    summary = json.loads((run / "summary.json").read_text())
    summary["arms"][HOSTILE] = summary["by_kind"][HOSTILE] = {HOSTILE: summary["arms"]["trained"]}
    summary["recipe"] = HOSTILE
    (run / "summary.json").write_text(json.dumps(summary))
    page = page_of(run)
    assert len(page.named("script")) == 1 and not page.named("img")
    assert any("alert(1)" in text for text in page.text)


def test_a_killed_run_still_has_a_page_that_says_what_is_missing(run):
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[:-40])
    (run / "summary.json").unlink()
    (run / "trajectories.jsonl").write_text('{"update": 1, "arm": "tr')
    text = " ".join(page_of(run).text)
    assert "metrics.jsonl: 1 line cut off or broken" in text
    assert "summary.json is missing: the run has not finished" in text
    assert "trajectories.jsonl: 1 line" in text


@pytest.mark.parametrize("keep", ["recipe.toml", "metrics.jsonl", "summary.json"])
def test_any_one_file_is_enough(run, keep):
    for path in run.iterdir():
        if path.name != keep:
            path.unlink()
    assert "Inspan run" in " ".join(page_of(run).text)


@pytest.mark.parametrize(
    "junk", ["", "null", "[]", "{", "NaN", '{"arms": 3, "by_kind": [1]}', '{"arms": {"a": {"n": "x"}}}']
)
def test_files_of_the_wrong_shape_do_not_stop_it(run, junk):
    for name in ("summary.json", "metrics.jsonl", "trajectories.jsonl", "recipe.toml"):
        (run / name).write_text(junk)
    assert page_of(run)


def test_odd_trajectories_do_not_stop_it(run):
    odd = [
        {},
        {"task": 3, "sessions": "x", "terms": [1]},
        {"sessions": [{"id": "a", "parent_call": "z", "messages": [{}, 3, {"role": "assistant", "tool_calls": 7}]}]},
        {"sessions": [None, {"id": "a", "messages": [{"role": "assistant", "tool_calls": [None, {"id": "a1"}]}]}]},
    ]
    (run / "trajectories.jsonl").write_text("".join(json.dumps(o) + "\n" for o in odd))
    assert len(page_of(run).named("details")) >= 4


def test_sessions_that_are_their_own_parents_end(run):
    call = {"role": "assistant", "tool_calls": [{"id": "c", "name": "assign_task", "arguments": "{}"}]}
    sessions = [
        {"id": "a", "agent": "x", "parent": None, "parent_call": None, "messages": [call]},
        {"id": "b", "agent": "y", "parent": "b", "parent_call": "c", "messages": [call]},
    ]
    (run / "trajectories.jsonl").write_text(json.dumps({"sessions": sessions}) + "\n")
    assert page_of(run)


def test_long_texts_are_cut_and_say_so(run):
    (run / "trajectories.jsonl").write_text(json.dumps(synthetic.trajectory(1, text="x" * 50_000)) + "\n")
    assert any("more characters" in text for text in page_of(run).text)


def test_of_repeated_updates_the_last_one_holds(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"update": 40, "entropy": 0.125}) + "\n")
    figures = [json.loads(attrs["data-chart"]) for attrs in page_of(run).named("figure")]
    assert any(f["x"] == list(range(1, 41)) and f["lines"][0][-1] == 0.125 for f in figures)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="not a run directory"):
        build(tmp_path)
    with pytest.raises(InputError, match="no such run directory"):
        build(tmp_path / "nowhere")


def test_a_page_that_cannot_be_written_is_a_store_error(run):
    (run / "report.part").mkdir()
    with pytest.raises(StoreError, match="cannot write the report"):
        build(run)
