"""Where the native library comes from, and what happens where it cannot be had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specoffload_kernels as kernels
from specoffload_kernels.native import build

NATIVE = [name for name in kernels.available_backends() if name != "torch"]


def test_describe_names_the_path_and_the_reason() -> None:
    described = kernels.describe()
    assert described["backend"] == kernels.backend()
    assert described["backend"] in kernels.available_backends()
    assert described["reason"]
    assert (described["library"] is None) == (described["backend"] == "torch")


def test_forced_backend_holds_until_its_end() -> None:
    before = kernels.backend()
    with kernels.forced_backend("torch"):
        assert kernels.backend() == "torch"
        assert kernels.describe()["reason"] == "forced to torch"
    assert kernels.backend() == before


def test_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="native-portable"), kernels.forced_backend("sse9"):
        pass


@pytest.mark.skipif(not NATIVE, reason="needs a C++ compiler")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_library_shares_torchs_threads() -> None:
    assert kernels.describe()["threads"] == "torch's"
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len([path for path in mapped if "libgomp" in path or "libomp" in path]) == 1


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(kernels.NativeUnavailableError, match="no-such-compiler"):
        build.build()


def test_failing_compiler_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho out of luck >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECOFFLOAD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(kernels.NativeUnavailableError, match="out of luck"):
        build.build()
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_unwritable_cache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexit 0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECOFFLOAD_CACHE", str(blocked))
    with pytest.raises(kernels.NativeUnavailableError, match="SPECOFFLOAD_CACHE"):
        build.build()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"SPECOFFLOAD_KERNELS": "torch"}, "SPECOFFLOAD_KERNELS=torch"),
        ({"CXX": "no-such-compiler"}, "no-such-compiler"),
    ],
)
def test_torch_path_serves_and_says_why(variables: dict[str, str], reason: str) -> None:
    program = """
import json, torch, specoffload_kernels as kernels
zero = torch.zeros(1, dtype=torch.int64)
part = kernels.paged_attention(
    torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 4, 8), torch.zeros(1, 1, dtype=torch.int32),
    zero, zero + 1, scale=1.0)
print(json.dumps([kernels.describe(), part.out_BQHD.sum().item()]))
"""
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": str(Path(kernels.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    described, total = json.loads(done.stdout)
    assert described["backend"] == "torch"
    assert reason in described["reason"]
    assert total == 16
    # A choice needs no warning; a fallback is logged once.
    assert done.stderr.count("slower torch path") == (
        0 if "SPECOFFLOAD_KERNELS" in variables else 1
    )


def test_threads_are_torchs_own_setting() -> None:
    before = torch.get_num_threads()
    kernels.describe()
    assert torch.get_num_threads() == before
