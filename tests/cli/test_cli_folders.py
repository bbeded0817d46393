"""Run directories are chosen, held and never mixed up."""

from __future__ import annotations

import pytest

from inspan.cli import folders
from inspan.config import dump_toml, from_dict, load
from inspan.errors import CheckpointError, InputError, StoreError

RECIPE = from_dict({"name": "my run"})


@pytest.fixture(autouse=True)
def _inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make(folder, recipe=RECIPE):
    folder.mkdir(parents=True)
    folders.write_recipe(recipe, folder)
    return folder


def test_runs_are_numbered_and_resume_takes_the_last(tmp_path):
    target = tmp_path / "r.toml"
    assert str(folders.choose(RECIPE, target, None, resume=False)) == "runs/my-run-1"
    make(tmp_path / "runs" / "my-run-1")
    make(tmp_path / "runs" / "my-run-2")
    make(tmp_path / "runs" / "my-run-extra-9")
    assert str(folders.choose(RECIPE, target, None, resume=False)) == "runs/my-run-3"
    assert str(folders.choose(RECIPE, target, None, resume=True)) == "runs/my-run-2"


def test_a_run_directory_stands_for_its_recipe(tmp_path):
    run = make(tmp_path / "run")
    assert load(folders.recipe_path(run)).name == "my run"
    assert folders.choose(RECIPE, run, None, resume=True) == run


def test_a_folder_without_a_recipe_is_named(tmp_path):
    with pytest.raises(InputError, match=r"holds no recipe\.toml"):
        folders.recipe_path(tmp_path)


def test_a_used_directory_is_refused_unless_resumed(tmp_path):
    run = make(tmp_path / "run")
    with pytest.raises(InputError, match="not empty"):
        folders.choose(RECIPE, tmp_path / "r.toml", run, resume=False)
    assert folders.choose(RECIPE, tmp_path / "r.toml", run, resume=True) == run


def test_resuming_nothing_is_refused(tmp_path):
    for out in (None, tmp_path / "empty"):
        with pytest.raises(InputError, match="nothing to resume"):
            folders.choose(RECIPE, tmp_path / "r.toml", out, resume=True)


def test_a_second_process_cannot_use_the_directory(tmp_path):
    with (
        folders.held(tmp_path / "run"),
        pytest.raises(StoreError, match="another process"),
        folders.held(tmp_path / "run"),
    ):
        pass
    with folders.held(tmp_path / "run"):
        pass


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot create the run directory"), folders.held(tmp_path / "file" / "run"):
        pass


def test_resuming_under_another_recipe_names_the_keys(tmp_path):
    run = make(tmp_path / "run")
    longer = from_dict({"name": "other", "train": {"updates": 99}})
    folders.check_resumable(longer, run)
    other = from_dict({"train": {"lr": 0.5, "checkpoint_every": 3}, "rewards": [{"use": "item_f1", "weight": 2.0}]})
    with pytest.raises(CheckpointError) as caught:
        folders.check_resumable(other, run)
    assert "rewards.0.weight, train.lr differ" in str(caught.value)


def test_the_written_recipe_is_the_resolved_one(tmp_path):
    run = make(tmp_path / "run")
    assert (run / "recipe.toml").read_text() == dump_toml(RECIPE)
