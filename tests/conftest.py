"""What holds for every test: offline, one thread, the chosen Hypothesis profile."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from strategies import load_profile

load_profile()

if importlib.util.find_spec("torch") is not None:
    import torch

    # The models are so small that a second thread only costs; and the sums come out the same.
    torch.set_num_threads(1)
