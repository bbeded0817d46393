"""Adapters on layers that a model does not have are refused by name."""

from __future__ import annotations

import pytest
from learner_fakes import tiny_model

from inspan.errors import ModelError
from inspan.learner.model import Lora

pytest.importorskip("peft", reason="the extra `lora` is not installed")


def test_unknown_targets_are_named() -> None:
    with pytest.raises(ModelError, match="nope"):
        tiny_model(lora=Lora(rank=2, targets=("nope",)))
