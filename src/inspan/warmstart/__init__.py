"""The base model: a tokenizer, a copy phase, demonstrations, and the supervised training that makes it."""

from inspan.warmstart.make import run

__all__ = ["run"]
