"""Compiles the native library into the wheel, so that its users need no compiler."""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = Path("kernels/specoffload_kernels/native/build.py")


class NativeLibraryHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library into a wheel for this platform; without a compiler the wheel stays pure.

    An installation in place stays pure, too: its library is built at first use, and again whenever
    the sources change.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling where the library belongs and what the wheel runs on."""
        if version == "editable":
            return
        build = self._module()
        self._folder = tempfile.TemporaryDirectory(prefix="specoffload-")
        try:
            library = build.build_to_ship(Path(self._folder.name))
        except build.NativeUnavailableError as error:
            self.app.display_warning(f"the wheel will hold no native library: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["force_include"][str(library)] = f"specoffload_kernels/native/{library.name}"
        build_data["pure_python"] = False
        # Called through ctypes, the library knows no version of Python.
        build_data["tag"] = f"py3-none-{platform}"

    def _module(self) -> ModuleType:
        """Load the file by itself: its package would want torch."""
        spec = importlib.util.spec_from_file_location("build", Path(self.root) / _BUILD)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
