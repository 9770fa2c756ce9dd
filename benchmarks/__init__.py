"""Measurements that docs/evidence/results.md and other pages cite. Nothing is downloaded, and one thread computes."""

import os

for _name in ("HF_HUB_OFFLINE", "TRL_EXPERIMENTAL_SILENCE", "OMP_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
