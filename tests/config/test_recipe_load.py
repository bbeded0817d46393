"""Loading recipes: defaults, `extends`, overrides, and messages that say what, where and what to do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inspan.config import dump_toml, from_dict, load, parse_override
from inspan.errors import RecipeError

TWO_TERMS = "[[rewards]]\nuse = 'item_f1'\n[[rewards]]\nuse = 'r_parallel'"


@pytest.fixture
def write(tmp_path):
    def _write(text, name="recipe.toml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write


def refused(path, *overrides):
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_an_empty_recipe_is_the_default_swarm(write):
    recipe = load(write(""))
    assert recipe.agents["orchestrator"].trainable and not recipe.agents["subagent"].trainable
    assert (recipe.agents["orchestrator"].policy, recipe.agents["subagent"].policy) == ("policy", "policy@v0")
    assert recipe.train.group_size == 8 and recipe.tasks.use == "facts"


def test_own_tasks_need_only_a_path(write, tmp_path):
    recipe = load(write('harness = "my_agent:run"\n[tasks]\npath = "tasks.jsonl"'))
    assert recipe.tasks.use == "" and recipe.tasks.path == str(tmp_path / "tasks.jsonl")
    assert list(recipe.agents) == ["main"] and recipe.agents["main"].trainable
    assert recipe.python_path == [str(tmp_path)]


def test_weights_may_be_numbers_or_schedules(write):
    text = TWO_TERMS + "\nweight = { from = 0.3, to = 0, over = 0.5 }\ncap = 4"
    fixed, annealed = load(write(text)).rewards
    assert fixed.weight.constant and fixed.weight.from_ == 1.0
    assert (annealed.weight.from_, annealed.weight.to, annealed.weight.over) == (0.3, 0.0, 0.5)
    assert annealed.params == {"cap": 4}


def test_resolved_recipe_round_trips(write):
    text = (
        'name = "quo\\"ted ✓"\n[options]\nk = [1, {a = "b"}]\nday = 2026-11-30\n'
        "[train]\nkl = {coef = 0.1}\n[agents.subagent]\n"
        'stages = [{from = 0.0, policy = "policy@v0"}, {from = 0.5, policy = "/x/y"}]\n'
        '[[rewards]]\nuse = "item_f1"\nweight = {from = 0.1, to = 0.2, over = 0.3}'
    )
    recipe = load(write(text))
    assert load(write(dump_toml(recipe), "again.toml")) == recipe


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\ngroup_sise = 4", 'train.group_sise: unknown key; did you mean "train.group_size"?'),
        ("lr = 0.1", 'lr: unknown key; did you mean "train.lr"?'),
        ("[train.kl]\nestimater = 'k1'", 'did you mean "train.kl.estimator"?'),
        ("[[rewards]]\nuse = 'item_f1'\nwieght = 1", 'rewards.0: unknown key "wieght"; did you mean "weight"?'),
        ("[[rewards]]\nuse = 'r_paralel'", 'unknown reward term rewards.0.use "r_paralel"; did you mean "r_parallel"?'),
        ("harness = 'swam'", 'unknown harness "swam"; did you mean "swarm"?'),
        ("[train]\nlr = 'fast'", 'train.lr: given "fast" (a string), expected a number'),
        ("[train]\nupdates = 2.5", "train.updates: given 2.5, expected a whole number"),
        ("[train]\nupdates = true", "train.updates: given true (a boolean), expected a whole number"),
        ("[train]\nlr = nan", "train.lr: given nan, expected a"),
        ("train = 3", "train: given 3, expected a table"),
        ("[train]\nobjective = 'kimmi'", 'did you mean "kimi"?'),
        ("[train]\ngroup_size = 1", "train.group_size: given 1, expected a number >= 2"),
        ("[limits]\ncritical_steps = 0", "limits.critical_steps: given 0, expected a number >= 1"),
        ("rewards = []", "rewards: given an empty list, expected at least 1 entry"),
        ("[[rewards]]\nuse = 'item_f1'\nweight = 0", "every reward has weight 0"),
        ("[[rewards]]\nweight = 1", "rewards.0.use: missing"),
        (
            "[[rewards]]\nuse = 'item_f1'\nweight = 'x'",
            'rewards.0.weight: given "x" (a string), expected a number, or a table',
        ),
        ("[tasks]\nuse = 'facts'\npath = 'x'", "both `use` and `path` are given"),
        ("[tasks]\nuse = ''", "no task source"),
        ("[tasks]\ncorpus = 'docs'", "`corpus` belongs to your own tasks"),
        ("[tasks]\nkinds = {wide = 0.0}", "all shares in `kinds` are zero"),
        ("[agents.orchestrator]\ntrainable = false", "no agent is trainable"),
        ("[agents.subagent]\ntrainable = true\npolicy = 'policy@v0'", 'policy = "policy@v0" is frozen'),
        (
            "[agents.subagent]\nstages = [{from = 0.5, policy = 'a'}, {from = 0.0, policy = 'b'}]",
            "`stages` must ascend in `from`, given [0.5, 0.0]",
        ),
        ("[agents.orchestrator]\ntrainable = true\nstages = [{from = 0, policy = 'a'}]", "cannot have `stages`"),
        ("[rollout]\nmode = 'async'\nmax_staleness = 0", "needs rollout.max_staleness >= 1"),
        ("deterministic = true\n[rollout]\nmode = 'async'", "deterministic = true needs"),
        ("[limits]\ntokens = 100", "leaves no room beside sampling.max_tokens"),
        ("[sampling]\ntop_p = 0.9", "cannot reproduce a truncated distribution"),
        ("[train]\nlr = = 3", "TOML syntax error: Invalid value (at line 2"),
    ],
)
def test_faults_are_named_with_file_key_and_remedy(write, text, expected):
    message = refused(write(text))
    assert "recipe.toml" in message and expected in message


def test_all_faults_are_listed_at_once(write):
    message = refused(write("[train]\nlr = 'x'\ngroups = 0"))
    assert "2 faults" in message and "train.lr" in message and "train.groups" in message


def test_a_missing_recipe_names_those_nearby(write, tmp_path):
    write("", "swarm.toml")
    message = refused(tmp_path / "swram.toml")
    assert "no such recipe" in message and "swarm.toml" in message
    assert "cannot be read" in refused(tmp_path)


def test_a_recipe_that_is_not_utf8_is_refused_with_the_place(tmp_path):
    path = tmp_path / "latin.toml"
    path.write_bytes(b'name = "caf\xe9"')
    assert "not UTF-8 (byte 11)" in refused(path)


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_bytes(b'\xef\xbb\xbfname = "marked"')
    assert load(path).name == "marked"


@pytest.mark.parametrize(
    ("text", "expected"), [("options.x = " + "[" * 5000, "nested"), ("seed = " + "9" * 5000, "TOML syntax error")]
)
def test_what_the_reader_of_toml_gives_up_on_is_a_fault_of_the_recipe(write, text, expected):
    assert expected in refused(write(text))


def test_extends_merges_tables_and_set_changes_one_entry(write, tmp_path):
    (tmp_path / "zoo").mkdir()
    base = "[train]\nlr = 0.5\ngroups = 3\n[tasks]\nkinds = {wide = 1.0}\n" + TWO_TERMS
    write(base, "base.toml")
    child = write(
        "extends = '../base.toml'\n[train]\ngroups = 5\n[tasks]\nkinds = {deep = 1.0}\n[set]\n'rewards.1.weight' = 0",
        "zoo/child.toml",
    )
    recipe = load(child)
    assert (recipe.train.lr, recipe.train.groups) == (0.5, 5)
    assert recipe.tasks.kinds == {"deep": 1.0}
    assert recipe.rewards[0].weight.from_ == 1.0 and recipe.rewards[1].weight.from_ == 0.0


def test_a_fault_in_an_extended_recipe_names_that_file(write):
    write("[train]\nlr = 'x'", "base.toml")
    assert "base.toml: train.lr" in refused(write("extends = 'base.toml'", "child.toml"))


def test_circular_extends_are_refused(write):
    write("extends = 'b.toml'", "a.toml")
    assert "in a circle: a.toml → b.toml → a.toml" in refused(write("extends = 'a.toml'", "b.toml").with_name("a.toml"))


def test_overrides_take_toml_values_indexes_and_bare_words(write):
    recipe = load(
        write(TWO_TERMS),
        [
            "train.lr=3e-4",
            "rewards.1.weight=0",
            "model=tiny",
            "agents.subagent.trainable=true",
            "tasks.kinds={deep=1.0}",
        ],
    )
    assert recipe.train.lr == 3e-4 and recipe.rewards[1].weight.to == 0.0 and recipe.tasks.kinds == {"deep": 1.0}
    assert recipe.agents["subagent"].policy == "policy"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr", "not an override"),
        ("=3", "not an override"),
        ("train..lr=3", "not an override"),
        ("rewards.5.weight=0", "rewards has 1 entries, no [5]"),
        ("seed.x=1", "seed is a plain value"),
        ("train.lr=[1", "is not a TOML value"),
        ("train.lr=", "is not a TOML value"),
        ("train.l_r=1", "--set train.l_r=1: train.l_r: unknown key"),
        ("train.lr=1\nseed=3", "more than one value"),
    ],
)
def test_bad_overrides_are_explained(write, override, expected):
    assert expected in refused(write("seed = 1\n[[rewards]]\nuse = 'item_f1'"), override)


def test_parse_override_reads_the_value_as_toml():
    assert parse_override("a.0.b=[1, 'x']") == (("a", 0, "b"), [1, "x"])
    assert parse_override("tasks.path=./my tasks.jsonl") == (("tasks", "path"), "./my tasks.jsonl")


def test_the_hash_ignores_what_may_change_on_resume_and_nothing_else(write, tmp_path):
    key = from_dict({}).hash()
    assert (
        from_dict({"name": "b", "train": {"updates": 99}, "engine": {"threads": 2}, "eval": {"every": 3}}).hash() == key
    )
    assert from_dict({"seed": 1}).hash() != key
    assert from_dict({"train": {"lr": 0.5}}).hash() != key
    assert from_dict({"rewards": [{"use": "item_f1", "weight": 2.0}]}).hash() != key
    here, there = {"tasks": {"path": "/a/t.jsonl"}}, {"tasks": {"path": "/b/t.jsonl"}}
    assert from_dict(here).hash() == from_dict(there).hash()


def test_reading_a_recipe_imports_no_torch():
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import sys, inspan.config as c; c.from_dict({{}}); sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
