"""The Triton kernels' numerics, without a GPU: runs `tests/interpreted` in a process of its own.

The flag that turns the interpreter on is read when Triton is imported, and a process that has
imported it so cannot compile.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.timeout(900)
def test_kernels_equal_their_definitions_when_interpreted() -> None:
    # The interpreter computes log(0) = -inf, which is meant, and NumPy warns of it.
    run = subprocess.run(
        [
            *(sys.executable, "-W", "ignore::RuntimeWarning"),
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted"),
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = run.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"\d+ passed.* in .*", summary), summary
    assert "skipped" not in summary
