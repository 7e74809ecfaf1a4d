"""Which path attention on the CPU takes: decided once, stated with its reason, forceable."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from specoffload_kernels.native.build import NativeUnavailableError
from specoffload_kernels.native.library import Isa, NativeLibrary, load

_LOGGER = logging.getLogger(__name__)
_VARIABLE = "SPECOFFLOAD_KERNELS"
_BACKENDS = {
    "native-avx512": Isa.AVX512,
    "native-avx2": Isa.AVX2,
    "native-portable": Isa.PORTABLE,
    "torch": None,
}


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A path and why it was chosen.

    Attributes:
        backend: "native-avx512", "native-avx2", "native-portable" or "torch".
        reason: One sentence for the user.
        library: The native library, or None for the torch path.
    """

    backend: str
    reason: str
    library: NativeLibrary | None

    @property
    def isa(self) -> Isa | None:
        """The instruction set of a native path."""
        return _BACKENDS[self.backend]


_forced: Selection | None = None


def selected() -> Selection:
    """Return the path in use. The first call may compile the native library (some seconds)."""
    return _forced or _default()


@contextlib.contextmanager
def forced_backend(name: str) -> Iterator[None]:
    """Use one path for the whole process until the context ends, as tests and benchmarks need.

    Args:
        name: What ``backend()`` may return, with or without the "native-".

    Raises:
        ValueError: There is no such path.
        NativeUnavailableError: It does not run here; the message says why.
    """
    global _forced
    before, _forced = _forced, _choose(name, f"forced to {name}")
    try:
        yield
    finally:
        _forced = before


def torch_is_forced() -> bool:
    """Say whether the torch path was asked for, on every device."""
    return _asked() == "torch" if _forced is None else _forced.backend == "torch"


@functools.cache
def available_backends() -> tuple[str, ...]:
    """Return the paths that run here, the fastest first."""
    try:
        best = _library().isa
    except NativeUnavailableError:
        return ("torch",)
    return tuple(name for name, isa in _BACKENDS.items() if isa is None or isa <= best)


@functools.cache
def _default() -> Selection:
    asked = _asked()
    if asked != "auto":
        return _choose(asked, f"{_VARIABLE}={asked}")
    try:
        library = _library()
    except NativeUnavailableError as error:
        _LOGGER.warning("attention on the CPU uses the slower torch path: %s", error)
        return Selection(backend="torch", reason=str(error), library=None)
    name = f"native-{library.isa.name.lower()}"
    return Selection(backend=name, reason="the best that this processor runs", library=library)


@functools.cache
def _asked() -> str:
    return os.environ.get(_VARIABLE, "").strip().lower() or "auto"


def _choose(name: str, reason: str) -> Selection:
    backend = name if name in _BACKENDS else f"native-{name}"
    if backend not in _BACKENDS:
        raise ValueError(
            f"no kernels called {name!r} ({_VARIABLE}); choose one of auto, {', '.join(_BACKENDS)}"
        )
    isa = _BACKENDS[backend]
    if isa is None:
        return Selection(backend=backend, reason=reason, library=None)
    library = _library()
    if isa > library.isa:
        raise NativeUnavailableError(
            f"{backend} does not run on this processor; its best is {library.isa.name}"
        )
    return Selection(backend=backend, reason=reason, library=library)


@functools.cache
def _library() -> NativeLibrary:
    return load()
