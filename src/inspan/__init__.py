"""Inspan: reinforcement learning for agents inside the harness they ship in."""

__version__ = "0.1.0"
