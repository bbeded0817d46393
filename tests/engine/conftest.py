"""Fixtures of the engine's tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_models import make_model


@pytest.fixture(scope="session")
def llama() -> Any:
    """The default tiny model."""
    return make_model("llama")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small models are fastest, and other tests least disturbed, on one thread."""
    torch.set_num_threads(1)
