"""What rollouts work on: tasks by split, and each rollout's tools. Contract: train and held-out share no entity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from inspan.config import Recipe
from inspan.config.search import Search
from inspan.errors import TaskError
from inspan.harness.base import Toolbox
from inspan.harness.search.corpus_tools import CorpusTools
from inspan.harness.tools import Faults, Library, LibraryTools
from inspan.retrieval.base import Retriever
from inspan.retrieval.corpus import Document, load_corpus
from inspan.retrieval.memory import index_passages, open_corpus
from inspan.tasks.base import Task
from inspan.tasks.facts import atlas, questions
from inspan.tasks.facts.world import INFOBOX, PROSE, UNSEEN, World, build
from inspan.tasks.load import load_tasks
from inspan.tasks.retrieval import multihop
from inspan.tasks.retrieval.passages import corpus_of
from inspan.trace.records import ToolEvent

HELD_OUT, UNSEEN_LAYOUT = "held_out", "unseen_layout"
LONG_SHARE = 0.12
UNSEEN_SHARE = 3  # one task of the unseen layout to so many held-out ones


@dataclass(slots=True)
class Environment:
    """Tasks to train on, held-out tasks by split, and the library or corpus that each task's tools read."""

    train: list[Task]
    held_out: Mapping[str, list[Task]]
    fail_rate: float = 0.0
    libraries: dict[str, Library] = field(default_factory=dict)  # by the value of task.meta["library"]
    options: Mapping[str, Any] = field(default_factory=dict)
    corpora: dict[str, Retriever] = field(default_factory=dict)  # likewise
    search: Search = field(default_factory=Search)

    def make_tools(self, task: Task, seed: int, record: Callable[[ToolEvent], None]) -> Toolbox | None:
        """The tools of one rollout; None when the task set brings neither library nor corpus."""
        name, faults = str(task.meta.get("library", "")), Faults(self.fail_rate, seed)
        if name in self.corpora:
            candidates, most = self.search.candidates, self.search.grep_chunks
            return CorpusTools(self.corpora[name], candidates, most, faults, on_event=record)
        library = self.libraries.get(name)
        return None if library is None else LibraryTools(library, faults=faults, on_event=record, **self.options)


def make_environment(recipe: Recipe) -> Environment:
    """The environment that a recipe's `[tasks]` describe. Raises TaskError or CorpusError."""
    makers = {"facts": _facts, "retrieval": _retrieval, "": _own}
    return makers[recipe.tasks.use](recipe)


def _facts(recipe: Recipe) -> Environment:
    section = recipe.tasks
    widths = questions.Widths(section.wide, section.mixed)
    # Wide tasks of the unseen layout use the widths of the held-out ones: only names and layout of the facts change.
    splits = {
        "train": (atlas.entities("train"), (INFOBOX, PROSE), section.train, widths),
        HELD_OUT: (atlas.entities("held_out"), (INFOBOX, PROSE), section.held_out, questions.Widths()),
        UNSEEN_LAYOUT: (
            atlas.entities("held_out"), (UNSEEN,), section.held_out // UNSEEN_SHARE, questions.Widths(),
        ),
    }  # fmt: skip
    tasks: dict[str, list[Task]] = {}
    libraries: dict[str, Library] = {}
    for name, (entities, layouts, count, width) in splits.items():
        world = build(entities, seed=0, layouts=layouts, long_share=LONG_SHARE)
        libraries[name] = library_of(world)
        seed = recipe.seed if name == "train" else 0  # all seeds are judged on the same held-out tasks
        kinds = section.kinds if name == "train" else section.held_out_kinds or section.kinds
        made = questions.make_set(world, kinds, count, seed=seed, prefix=name, widths=width) if count else []
        tasks[name] = [_in_library(task, name) for task in made]
    train = tasks.pop("train")
    return Environment(train, {k: v for k, v in tasks.items() if v}, section.fail_rate, libraries)


def _retrieval(recipe: Recipe) -> Environment:
    """Multi-hop questions over the facts. All seeds are judged on the same held-out tasks and corpora."""
    section = recipe.tasks
    splits = {
        "train": (atlas.entities("train"), (INFOBOX, PROSE), section.train),
        HELD_OUT: (atlas.entities("held_out"), (INFOBOX, PROSE), section.held_out),
        UNSEEN_LAYOUT: (atlas.entities("held_out"), (UNSEEN,), section.held_out // UNSEEN_SHARE),
    }
    tasks: dict[str, list[Task]] = {}
    corpora: dict[str, Retriever] = {}
    for name, (entities, layouts, count) in splits.items():
        corpus = corpus_of(build(entities, seed=0, layouts=layouts), layouts, seed=0)
        corpora[name] = index_passages(corpus.passages)
        kinds = section.kinds if name == "train" else section.held_out_kinds or section.kinds
        hops = {number: kinds[multihop.kind(number)] for number in multihop.HOPS if multihop.kind(number) in kinds}
        seed = recipe.seed if name == "train" else 0
        made = multihop.make_set(corpus, hops, count, seed=seed, prefix=name).tasks if count else []
        tasks[name] = [_in_library(task, name) for task in made]
    train = tasks.pop("train")
    held_out = {name: made for name, made in tasks.items() if made}
    return Environment(train, held_out, section.fail_rate, corpora=corpora, search=recipe.search)


def library_of(world: World) -> Library:
    """The pages of a world as a library."""
    return Library.of([Document(page.ref, page.text, page.listed) for page in world.pages.values()])


def _in_library(task: Task, library: str) -> Task:
    return Task(
        task.id, task.prompt, task.answer, task.kind, task.columns, task.keys, {**task.meta, "library": library}
    )


def _own(recipe: Recipe) -> Environment:
    """A user's tasks: those marked `"split": "held_out"` are held out, else the last fifth of them."""
    section = recipe.tasks
    tasks = load_tasks(section.path)
    libraries: dict[str, Library] = {}
    corpora: dict[str, Retriever] = {}
    if section.corpus:
        if "search" in (recipe.harness, *(arm.harness for arm in recipe.eval.arms.values())):
            corpora["corpus"] = open_corpus(section.corpus)
        else:
            libraries["corpus"] = Library.of(load_corpus(section.corpus))
        tasks = [_in_library(task, "corpus") for task in tasks]
    marked = [task for task in tasks if task.meta.get("split") == HELD_OUT]
    train = [task for task in tasks if task.meta.get("split") != HELD_OUT]
    if not marked and len(train) > 1:
        cut = max(1, len(train) // 5)
        train, marked = train[:-cut], train[-cut:]
    if not train:
        raise TaskError("no task is left to train on", where=section.path, hint="mark fewer of them as held_out")
    options = {"snippet_chars": section.snippet_chars} if section.corpus else {}
    held_out = {HELD_OUT: marked or train}
    return Environment(train, held_out, section.fail_rate, libraries, options, corpora, recipe.search)
