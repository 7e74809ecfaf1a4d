"""The examples run as a reader would run them, at the smallest size that they know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart_shows_a_report() -> None:
    assert "tokens/s" in run("quickstart.py")


@pytest.mark.timeout(600)
def test_the_gpu_check_knows_its_way_without_a_gpu() -> None:
    shown = run("gpu_check.py", "--device", "cpu", "--small")
    assert "host to device GB/s" in shown
    assert shown.count("%") >= 4
    assert "specoffload, 60% of KV | yes" in shown
    assert "not run" in run("gpu_check.py", "--device", "cpu", "--small", "--limit-s", "0")
