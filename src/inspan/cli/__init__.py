"""The `inspan` command. Contract: `--help` and bad input answer at once; torch is imported only by what needs it."""

from inspan.cli.shell import main

__all__ = ["main"]
