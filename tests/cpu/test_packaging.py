"""What is in the wheel, and what an import costs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import specoffload

ROOT = Path(__file__).parents[2]

NO_TORCH = """
import sys

class Blind:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "triton", "accelerate"}:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Blind, sys.meta_path)
"""


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of all files in a wheel built from this tree, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_the_wheel_holds_our_three_packages_and_nothing_else(wheel_files: list[str]) -> None:
    names = {file.partition("/")[0] for file in wheel_files}
    metadata = {name for name in names if name.endswith(".dist-info")}
    assert len(metadata) == 1
    assert names - metadata == {"specoffload", "specoffload_kernels", "specoffload_fusion"}


def test_the_wheel_holds_the_tiny_pair_and_the_type_marks(wheel_files: list[str]) -> None:
    for package in ("specoffload", "specoffload_kernels", "specoffload_fusion"):
        assert f"{package}/py.typed" in wheel_files
    for role in ("draft", "target"):
        for file in ("config.json", "model.safetensors"):
            assert f"specoffload/data/tiny_pair/{role}/{file}" in wheel_files


def test_every_source_file_is_in_the_wheel(wheel_files: list[str]) -> None:
    roots = {
        "specoffload": ROOT,
        "specoffload_kernels": ROOT / "kernels",
        "specoffload_fusion": ROOT / "fusion",
    }
    for package, root in roots.items():
        for suffix in ("*.py", "*.cpp", "*.h"):
            for path in (root / package).rglob(suffix):
                assert path.relative_to(root).as_posix() in wheel_files


def test_the_wheel_leaves_the_demo_draft_and_compiled_code_out(wheel_files: list[str]) -> None:
    assert not [file for file in wheel_files if "smollm2-draft" in file or file.endswith(".so")]


def test_importing_the_package_loads_nothing_heavy() -> None:
    _python("import sys, specoffload\nassert not {'torch', 'transformers'} & set(sys.modules)")


def test_the_package_can_be_configured_without_torch() -> None:
    _python(NO_TORCH + "import specoffload\nspecoffload.SpecOffloadConfig(device_budget='1GiB')")


def test_every_public_name_exists() -> None:
    for name in specoffload.__all__:
        assert getattr(specoffload, name) is not None


def test_the_tests_of_the_core_pass_without_torch() -> None:
    _python(
        NO_TORCH
        + "import os, pytest\n"
        + "os.environ['HYPOTHESIS_PROFILE'] = 'dev'\n"
        + "code = pytest.main(['tests/core', '-q', '-p', 'no:cacheprovider'])\n"
        + "sys.exit(code or 'torch' in sys.modules)"
    )


def _python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
