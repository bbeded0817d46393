"""Rollouts: groups dispatched, run in their harness, and handed out exactly once."""
