"""What a user may choose. Knows no torch: it is read before anything heavy is imported."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from specoffload.errors import ConfigError

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")

_DISK_IO: Final = ("auto", "direct", "buffered")

MAX_DRAFT_TOKENS: Final = 16
"""Most tokens drafted in a round: a verify pass takes at most one row more."""


def parse_bytes(value: int | str, *, name: str) -> int:
    """Return a number of bytes given as an int or as text such as "2GiB", "512 MB" or "4096".

    Raises:
        ConfigError: `value` is negative, or not a size.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name}={value!r} is not a size: give bytes or text such as '2GiB'")
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"{name}={value} is negative: give 0 bytes or more")
        return value
    match = _SIZE.fullmatch(value)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name}={value!r} is not a size: write a number and one of B, KiB, MiB, GiB, TiB"
        )
    return int(float(match[1]) * unit)


def format_bytes(num_bytes: float) -> str:
    """Return a size for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


@dataclass(frozen=True, kw_only=True)
class SpecOffloadConfig:
    """How a runner spends memory and how it drafts.

    Attributes:
        device_budget: bytes of KV (target, draft and staging) that may lie on the device at any
            time; int or text such as "2GiB". None: as much as a call needs.
        host_budget: bytes of host memory for blocks that left the device. "auto": half of what
            the machine (or its container) has free; 0: none.
        disk_path: folder for the spill file, for what fits neither; None: no disk tier.
        disk_io: "buffered": through the page cache, which serves reads from whatever memory is
            free. "direct": past it (O_DIRECT), for blocks of whole pages. "auto": direct where the
            device is a GPU and folder and blocks allow it, else buffered.
        block_size: tokens of one block; a power of two.
        num_draft_tokens: gamma, the tokens drafted a round; 0 is plain decoding through the pool.
            "auto": chosen each round from the measured acceptance, draft time and verify time.
        prefill_chunk: most prompt tokens in one forward pass; a small budget makes it smaller.
        collect_signal: keep the attention mass of every block at each verify.
        poison: fill freed slots with NaN, so that reading one shows (for tests; costs a fill).
    """

    device_budget: int | str | None = None
    host_budget: int | str = "auto"
    disk_path: str | Path | None = None
    disk_io: Literal["auto", "direct", "buffered"] = "auto"
    block_size: int = 64
    num_draft_tokens: int | Literal["auto"] = "auto"
    prefill_chunk: int = 512
    collect_signal: bool = True
    poison: bool = False

    def __post_init__(self) -> None:
        if self.device_budget is not None:
            parse_bytes(self.device_budget, name="device_budget")
        if self.host_budget != "auto":
            parse_bytes(self.host_budget, name="host_budget")
        if self.disk_io not in _DISK_IO:
            raise ConfigError(
                f"disk_io={self.disk_io!r} must be one of {', '.join(map(repr, _DISK_IO))}"
            )
        size = self.block_size
        if not _is_int(size) or not 1 <= size <= 1024 or size & (size - 1):
            raise ConfigError(f"block_size={size!r} must be a power of two from 1 to 1024")
        gamma = self.num_draft_tokens
        if gamma != "auto" and (not _is_int(gamma) or not 0 <= int(gamma) <= MAX_DRAFT_TOKENS):
            raise ConfigError(
                f"num_draft_tokens={gamma!r} must be an int from 0 to {MAX_DRAFT_TOKENS}, or 'auto'"
            )
        if not _is_int(self.prefill_chunk) or self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk={self.prefill_chunk!r} must be an int of at least 1")

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SpecOffloadConfig:
        """Build a configuration from a mapping of the attributes above.

        Raises:
            ConfigError: a key is unknown (the nearest known one is named) or a value is invalid.
        """
        known = [field.name for field in fields(cls)]
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
                raise ConfigError(f"unknown option {key!r}: {hint}")
        return cls(**options)

    @property
    def device_budget_bytes(self) -> int | None:
        """The device budget in bytes, None where there is no limit."""
        if self.device_budget is None:
            return None
        return parse_bytes(self.device_budget, name="device_budget")

    @property
    def max_draft_tokens(self) -> int:
        """The largest gamma that a round may have."""
        return MAX_DRAFT_TOKENS if self.num_draft_tokens == "auto" else int(self.num_draft_tokens)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
