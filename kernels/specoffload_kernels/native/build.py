"""Compiles the native library, or finds the one that came with the package.

Knows compilers, not what it builds. Needs nothing beyond the standard library: the build of a
wheel runs this file by itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).parent
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-w",
)
# Per instruction set: floats per vector, and the processor flags it needs, which the compiler and
# /proc/cpuinfo call the same. Each has an object file of its own: the linker must not pick code for
# one where another was meant.
_ISAS = {
    "portable": (4, ()),
    "avx2": (8, ("avx2", "fma")),
    "avx512": (16, ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")),
}


class NativeUnavailableError(RuntimeError):
    """The native library cannot be had here; the message says why."""


def cache_dir() -> Path:
    """Return the folder of built libraries: ``$SPECOFFLOAD_CACHE``, else one under the home."""
    chosen = os.environ.get("SPECOFFLOAD_CACHE")
    return (Path(chosen) if chosen else Path.home() / ".cache" / "specoffload") / "native"


def shipped() -> Path | None:
    """Return the library that came with the package, if it was built from the sources beside it."""
    library = _SOURCE / _shipped_name()
    return library if library.exists() else None


def build_to_ship(folder: Path) -> Path:
    """Compile the library for every processor of this machine's kind, to be found by ``shipped``.

    Raises:
        NativeUnavailableError: No compiler, or it failed.
    """
    compiler = _compiler()
    isas = list(_ISAS) if platform.machine() == "x86_64" else ["portable"]
    return _compile(compiler, isas, folder).replace(folder / _shipped_name())


def build() -> Path:
    """Return the built library's path, compiling it unless the cache has it (some seconds).

    The name in the cache hashes sources, flags, compiler version and machine. The file appears in
    one step, so processes that build at the same time do not disturb each other.

    Raises:
        NativeUnavailableError: No compiler, no writable cache, or the compiler failed.
    """
    compiler = _compiler()
    version = _run([compiler, "--version"])
    isas = _processor_isas()
    digest = _hash_of_sources()
    for part in (version, platform.machine(), repr(isas)):
        digest.update(part.encode())
    target = cache_dir() / digest.hexdigest()[:24] / "specoffload_native.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            _compile(compiler, isas, Path(scratch)).replace(target)
    except OSError as error:
        raise NativeUnavailableError(
            f"cannot write {target.parent} ({error}); set SPECOFFLOAD_CACHE to a writable folder"
        ) from error
    return target


def _shipped_name() -> str:
    return f"specoffload_native-{_hash_of_sources().hexdigest()[:24]}.so"


def _hash_of_sources() -> hashlib._Hash:
    digest = hashlib.sha256(repr((_FLAGS, _ISAS)).encode())
    for source in sorted(_SOURCE.glob("*.cpp")) + sorted(_SOURCE.glob("*.h")):
        digest.update(source.read_bytes())
    return digest


def _compiler() -> str:
    if not sys.platform.startswith("linux"):
        raise NativeUnavailableError(f"native kernels are built on Linux only, not {sys.platform}")
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise NativeUnavailableError(
        f"no C++ compiler: {wanted!r} of $CXX is not there"
        if wanted
        else "no C++ compiler: none of g++, clang++, c++ is there; install one or set $CXX"
    )


def _processor_isas() -> list[str]:
    """Return the instruction sets worth compiling: those of this processor."""
    if platform.machine() != "x86_64":
        return ["portable"]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    have = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return [isa for isa, (_, needed) in _ISAS.items() if have.issuperset(needed)]


def _compile(compiler: str, isas: list[str], scratch: Path) -> Path:
    units = [("entry.cpp", "entry", [f"-DSPECOFFLOAD_HAS_{isa.upper()}" for isa in isas])]
    for isa in isas:
        lanes, needed = _ISAS[isa]
        flags = [f"-DSPECOFFLOAD_ISA={isa}", f"-DSPECOFFLOAD_LANES={lanes}"]
        units.append(("attention.cpp", isa, flags + [f"-m{flag}" for flag in needed]))
    objects = []
    running = []
    for source, name, flags in units:
        objects.append(str(scratch / f"{name}.o"))
        command = [compiler, *_FLAGS, *flags, "-c", str(_SOURCE / source), "-o", objects[-1]]
        running.append(
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )
    # All are waited for before the first failure is reported: none may outlive the folder.
    errors = [process.communicate()[1] for process in running]
    for process, error in zip(running, errors, strict=True):
        if process.returncode:
            raise NativeUnavailableError(f"{compiler} failed: {error.strip()[-500:]}")
    library = scratch / "library.so"
    _run([compiler, "-shared", *objects, "-o", str(library)])
    return library


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        raise NativeUnavailableError(
            f"{command[0]} failed: {error.stderr.strip()[-500:]}"
        ) from error
    except OSError as error:
        raise NativeUnavailableError(f"cannot run {command[0]}: {error}") from error
    return done.stdout
