"""Speculative decoding over a paged, tiered KV cache for Hugging Face causal language models.

Importing this package loads neither torch nor transformers; the first use of a name below does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specoffload.config import SpecOffloadConfig
from specoffload.errors import (
    BudgetError,
    ConfigError,
    CorruptBlockError,
    SpecOffloadError,
    SpillError,
    UnsupportedModelError,
)
from specoffload.report import RunReport

if TYPE_CHECKING:
    from specoffload.pairs import Pair, load_hub_pair, load_pair
    from specoffload.runner import SpecOffloadRunner

__version__ = "0.1.0.dev0"

__all__ = [
    "BudgetError",
    "ConfigError",
    "CorruptBlockError",
    "Pair",
    "RunReport",
    "SpecOffloadConfig",
    "SpecOffloadError",
    "SpecOffloadRunner",
    "SpillError",
    "UnsupportedModelError",
    "__version__",
    "load_hub_pair",
    "load_pair",
]

_LAZY = {
    "Pair": "specoffload.pairs",
    "load_hub_pair": "specoffload.pairs",
    "load_pair": "specoffload.pairs",
    "SpecOffloadRunner": "specoffload.runner",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
