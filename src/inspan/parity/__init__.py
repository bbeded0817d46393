"""Parity: a policy is served and judged in the harness that it was trained in, or it is said what differs."""
