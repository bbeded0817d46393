"""A checkpoint is one cut, whole or absent; resuming equals never having stopped, bit for bit."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_fakes import make_credits, tiny_model

from inspan.errors import CheckpointError, ModelError, StoreError
from inspan.learner.checkpoint import latest, load_checkpoint, save_checkpoint
from inspan.learner.learner import Learner, LearnerSettings
from inspan.learner.losses import make_objective
from inspan.learner.model import Lora, load_model
from inspan.learner.optim import OptimSettings
from inspan.learner.store import read_weights


def new_learner(*, lora=None):
    settings = LearnerSettings(
        optim=OptimSettings(lr=1e-3, warmup=3, schedule="cosine"), minibatches=2, token_budget=64
    )
    return Learner(tiny_model(lora=lora), make_objective("tis", kl_coef=0.1), settings)


def state_of(learner):
    tensors, plain = learner.snapshot()
    return {k: v.clone() for k, v in tensors.items()}, plain


def same(a, b):
    return a[1] == b[1] and a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])


@pytest.mark.parametrize("lora", [None, Lora(rank=2)])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, lora):
    straight = new_learner(lora=lora)
    for step in range(5):
        straight.update(make_credits(step), step / 5)
    first = new_learner(lora=lora)
    for step in range(2):
        first.update(make_credits(step), step / 5)
    save_checkpoint(tmp_path, first, {"next": 2}, step=2)
    resumed = new_learner(lora=lora)
    loaded = load_checkpoint(latest(tmp_path), resumed)
    for step in range(loaded.state["next"], 5):
        resumed.update(make_credits(step), step / 5)
    assert same(state_of(straight), state_of(resumed))


def test_random_generators_and_the_callers_state_come_back(tmp_path):
    learner = new_learner()
    state = {"cursor": 7, "ledger": {"r1": "running"}, "pi": 0.1 + 0.2, "name": "é", "none": None}
    save_checkpoint(tmp_path, learner, state, step=1)
    expected = [random.random(), np.random.random(), torch.rand(1).item()]
    for generator in (random.seed, np.random.seed, torch.manual_seed):
        generator(99)
    loaded = load_checkpoint(latest(tmp_path), learner)
    assert loaded.state == state and loaded.step == 1
    assert [random.random(), np.random.random(), torch.rand(1).item()] == expected


def test_only_the_last_few_are_kept_and_the_newest_save_wins(tmp_path):
    learner = new_learner()
    for step in (1, 2, 3, 4, 2):  # the last one: a run that went back
        save_checkpoint(tmp_path, learner, {"step": step}, step=step, keep=2)
    assert len(list(tmp_path.iterdir())) == 2
    assert load_checkpoint(latest(tmp_path), learner).state == {"step": 2}
    assert latest(tmp_path / "nothing") is None


@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
def test_a_corrupt_checkpoint_names_the_file_and_the_previous_usable_one(tmp_path, fault, name):
    learner = new_learner()
    good = save_checkpoint(tmp_path, learner, {}, step=1)
    bad = save_checkpoint(tmp_path, learner, {}, step=2)
    file, data = bad / name, bytearray((bad / name).read_bytes())
    data[len(data) // 2] ^= 1
    if fault == "remove":
        file.unlink()
    else:
        file.write_bytes(bytes(data) if fault == "flip" else bytes(data[: len(data) // 2]))
    before = state_of(learner)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(latest(tmp_path), learner)
    assert str(file) in str(caught.value) and str(good) in str(caught.value)
    assert same(before, state_of(learner))
    load_checkpoint(good, learner)


def test_when_nothing_else_is_usable_it_says_so(tmp_path):
    learner = new_learner()
    bad = save_checkpoint(tmp_path, learner, {}, step=2)
    (bad / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="start again"):
        load_checkpoint(bad, learner)


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    path = save_checkpoint(tmp_path, new_learner(lora=Lora(rank=2)), {}, step=1)
    other = new_learner()
    before = state_of(other)
    with pytest.raises(ModelError, match="do not match"):
        load_checkpoint(path, other)
    assert same(before, state_of(other))


def test_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="not JSON"):
        save_checkpoint(tmp_path, new_learner(), {"odd": object()}, step=1)
    assert list(tmp_path.iterdir()) == []


OPERATIONS = 7  # fsync of tensors, of state (twice), of the manifest, of the directory; rename; fsync of the parent

CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_checkpoint import OPERATIONS, new_learner
from inspan.learner.checkpoint import save_checkpoint
fatal, calls = 0, 0
def dying(real):
    def call(*args):
        global calls
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    return call
os.fsync, os.rename = dying(os.fsync), dying(os.rename)
learner = new_learner()
for point in range(1, OPERATIONS + 2):
    root = os.path.join(sys.argv[2], str(point))
    save_checkpoint(root, learner, {"saved": 1}, step=1)
    child = os.fork()
    if child == 0:
        learner.version, calls, fatal = 9, 0, point
        save_checkpoint(root, learner, {"saved": 2}, step=2, keep=1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_kill_9_at_every_point_of_saving_leaves_a_whole_checkpoint(tmp_path):
    """What is found afterwards is the old cut until the rename, and the new one from then on."""
    arguments = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["-9"] * OPERATIONS + ["0"], done.stderr
    for point in range(1, OPERATIONS + 2):
        root, learner = tmp_path / str(point), new_learner()
        loaded = load_checkpoint(latest(root), learner)
        assert (loaded.state["saved"], learner.version) == ((1, 0) if point < OPERATIONS else (2, 9))
        save_checkpoint(root, learner, {}, step=3, keep=1)
        assert len(list(root.iterdir())) == 1  # what the dead run left behind is gone


def test_a_full_disk_is_a_clear_error_and_the_earlier_checkpoint_remains(tmp_path):
    """A file-size limit makes the kernel refuse the write, as a full disk does."""
    learner = new_learner()
    good = save_checkpoint(tmp_path, learner, {"saved": 1}, step=1)
    size = (good / "tensors.safetensors").stat().st_size
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with pytest.raises(StoreError, match="cannot write"):
            save_checkpoint(tmp_path, learner, {"saved": 2}, step=2)
        with pytest.raises(StoreError, match="cannot write"):
            learner.save_weights(tmp_path / "weights")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.glob("*")) == [good, tmp_path / "weights"] or list(tmp_path.glob("ckpt-*")) == [good]
    assert list((tmp_path / "weights").iterdir()) == []
    assert load_checkpoint(latest(tmp_path), learner).state == {"saved": 1}


def test_published_weights_load_and_equal_the_learners(tmp_path):
    learner = new_learner()
    learner.update(make_credits(), 0.0)
    (tmp_path / "tokenizer.json").write_text("{}")
    reference = learner.save_weights(tmp_path, beside=[tmp_path / "tokenizer.json"])
    assert (Path(reference.path) / "tokenizer.json").read_text() == "{}"
    version, tensors = read_weights(reference.path)
    assert version == reference.version == 1
    held = learner.weights().tensors
    assert tensors.keys() == held.keys() and all(torch.equal(tensors[k], held[k]) for k in held)
    again = load_model(reference.path)
    assert torch.equal(again.model.norm.weight, learner.model.model.norm.weight)
    with pytest.raises(StoreError, match="exists already"):
        learner.save_weights(tmp_path)


def test_unfinished_or_damaged_weights_are_refused(tmp_path):
    path = Path(new_learner().save_weights(tmp_path, 4).path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_weights(path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no manifest"):
        read_weights(path)
    assert manifest["version"] == 4
