"""Inspan: reinforcement learning for agents inside the harness they ship in."""

import os

__version__ = "0.1.0"

# How idle OpenMP threads wait; libgomp reads this once, when torch is first imported, so it stands here and only here.
# Those that spin long starve a busy neighbour; those that sleep at once make a second thread useless, since waking
# takes longer than a product. So: spin for some 0.2 ms (the count overrides the policy), and not at all when there are
# more threads than cores (the policy).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
