"""Training and evaluation: a recipe in, better weights, a table and a run directory out."""

from inspan.train.evaluate import evaluate
from inspan.train.loop import run

__all__ = ["evaluate", "run"]
