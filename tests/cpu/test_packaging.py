"""What is in the wheel, and what an import costs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
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


NO_COMPILER = {"CXX": "no-such-compiler"}

WHICH_LIBRARY = """
import json
from specoffload_kernels.native import build, library

def loaded():
    try:
        return str(library.load().path)
    except build.NativeUnavailableError as error:
        return str(error)

shipped = build.shipped()
image = shipped.read_bytes()
shipped.write_bytes(b"not a library")
broken = loaded()
shipped.write_bytes(image)
as_built = loaded()
source = shipped.with_name("entry.cpp")
source.write_text(source.read_text() + "// changed\\n")
print(json.dumps([as_built, broken, loaded()]))
"""


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build a wheel from this tree, without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def pure_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), **NO_COMPILER)


@pytest.fixture(scope="module")
def wheel_files(pure_wheel: Path) -> list[str]:
    """Names of all files in a wheel that was built without a compiler."""
    return zipfile.ZipFile(pure_wheel).namelist()


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


def test_a_wheel_built_without_a_compiler_is_for_any_platform(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler"
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the library is for Linux")
def test_a_wheel_ships_the_library_and_uses_it_while_it_fits(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path / "wheel")
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    (library,) = installed.rglob("*.so")
    assert library.parent == installed / "specoffload_kernels/native"
    done = subprocess.run(
        [sys.executable, "-c", WHICH_LIBRARY],
        env={**os.environ, **NO_COMPILER, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    as_built, broken, changed = json.loads(done.stdout)
    assert as_built == str(library)
    assert "no C++ compiler" in broken
    assert "no C++ compiler" in changed
    assert done.stderr.count("does not run here") == 1


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
