"""Judging policies: paired statistics over tasks and seeds."""
