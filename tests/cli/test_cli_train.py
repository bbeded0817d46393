"""`inspan train` around the loop: dry runs, stopping, what is left in the run directory."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

import inspan.train
from inspan.cli import train as command
from inspan.cli.export import Export, export, view
from inspan.cli.shell import Stopped
from inspan.config import load
from inspan.errors import CheckpointError, InputError
from inspan.stopping import Terminate
from inspan.trace.store import TraceStore


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.toml"
    path.write_text('name = "r"\n[train]\nupdates = 5\n')
    return path


@pytest.fixture
def loop(monkeypatch):
    """A loop that writes what the real one writes, and ends as the test wants."""

    def install(end=None):
        def run(recipe, *, out, resume, progress, verify):
            progress.start(recipe, recipe.train.updates)
            (out / "checkpoints" / "ckpt-000001-step-3").mkdir(parents=True, exist_ok=True)
            for update in range(3):
                metrics = {"update": update, "reward": 0.5}
                with (out / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(metrics) + "\n")
                progress.update(metrics)
            if end is not None:
                raise end
            summary = {"recipe": recipe.name, "arms": {"trained": {"n": 1, "item_f1": 0.5}}}
            (out / "summary.json").write_text(json.dumps(summary))
            progress.finish(summary)
            return summary

        monkeypatch.setattr(inspan.train, "run", run)

    return install


def go(recipe, settings=(), *, out=None, resume=False, dry_run=False):
    command.train(recipe, list(settings), out=out, resume=resume, dry_run=dry_run)


def test_a_dry_run_prints_a_recipe_that_loads_and_writes_nothing(recipe, tmp_path, capsys):
    go(recipe, command.overridden(["train.lr=0.5"], 7, True), dry_run=True)
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    resolved = load(again)
    assert (resolved.train.lr, resolved.seed, resolved.deterministic) == (0.5, 7, True)
    assert not (tmp_path / "runs").exists()


def test_a_run_leaves_recipe_report_and_a_table(recipe, tmp_path, loop, capsys):
    loop()
    go(recipe)
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "r-1"
    assert (folder / "report.html").is_file() and load(folder / "recipe.toml").train.updates == 5
    assert "On held-out tasks" in out and "report: runs/r-1/report.html" in out


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (Terminate(), 143)])
def test_a_stopped_run_says_what_is_saved_and_how_to_go_on(recipe, loop, stop, code):
    loop(stop)
    with pytest.raises(Stopped) as caught:
        go(recipe)
    assert caught.value.code == code
    assert "everything up to update 3 is saved in runs/r-1" in str(caught.value)
    assert "inspan train runs/r-1 --resume" in str(caught.value)


def test_the_named_command_resumes_the_run(recipe, tmp_path, loop):
    loop(KeyboardInterrupt())
    with pytest.raises(Stopped):
        go(recipe)
    loop()
    go(tmp_path / "runs" / "r-1", resume=True)
    assert (tmp_path / "runs" / "r-1" / "summary.json").is_file()


def test_resuming_with_other_settings_is_refused_before_anything_is_written(recipe, tmp_path, loop):
    loop(KeyboardInterrupt())
    with pytest.raises(Stopped):
        go(recipe)
    before = (tmp_path / "runs" / "r-1" / "recipe.toml").read_text()
    with pytest.raises(CheckpointError, match=r"train\.lr differs"):
        go(recipe, ["train.lr=0.5"], resume=True)
    assert (tmp_path / "runs" / "r-1" / "recipe.toml").read_text() == before


def test_an_error_in_the_loop_keeps_its_class(recipe, loop):
    loop(InputError("no tasks", where="tasks.jsonl"))
    with pytest.raises(InputError, match="no tasks"):
        go(recipe)


def test_a_run_that_was_killed_can_be_viewed(recipe, tmp_path, loop, capsys):
    loop(KeyboardInterrupt())
    with pytest.raises(Stopped):
        go(recipe)
    (tmp_path / "runs" / "r-1" / "report.html").unlink()
    view(tmp_path / "runs" / "r-1")
    assert capsys.readouterr().out.strip().endswith("report.html")


def test_export_writes_into_the_run_and_refuses_a_wrong_suffix(recipe, tmp_path, capsys):
    TraceStore(tmp_path / "trace.sqlite").close()
    export(tmp_path, Export("jsonl", "training"))
    assert (tmp_path / "training.jsonl").read_text() == ""
    assert "0 rows" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"does not end in \.parquet"):
        export(tmp_path, Export("parquet", out=tmp_path / "x.jsonl"))


def test_json_of_an_evaluation_is_all_that_stdout_gets(recipe, monkeypatch, capsys):
    def evaluate(recipe, *, run, progress, verify, allow_drift):
        print("a harness that talks")
        return {"arms": {"trained": {"n": 1}}}

    monkeypatch.setattr(inspan.train, "evaluate", evaluate)
    command.evaluate(recipe, [], as_json=True)
    out = capsys.readouterr()
    assert json.loads(out.out) == {"arms": {"trained": {"n": 1}}} and "a harness that talks" in out.err


def test_sigterm_ends_a_command_in_an_orderly_way():
    code = (
        "import os, signal, sys\nfrom inspan.cli import app, shell\n"
        "app.app.registered_commands.clear()\n"
        "@app.app.command()\ndef hang():\n    os.kill(os.getpid(), signal.SIGTERM)\n    signal.pause()\n"
        "sys.argv = ['inspan', 'hang']\nshell.main()"
    )
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code])
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (130, 143)
    assert signal.getsignal(signal.SIGTERM) is not None
