"""The rows of a bench, as values, as a table and as JSON.

Knows what was measured and on what machine. Refuses to know how.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch
import transformers

from specoffload.config import format_bytes
from specoffload.report import RunReport

_COLUMNS: Final = (
    "",
    "identical",
    "tokens/s",
    "tokens per verify",
    "KV moved up / down",
    "device peak / budget",
    "stalled",
)

_LABELS: Final = {
    "hf": "target.generate",
    "hf-assisted": "HF assisted",
    "hf-offloaded": "HF offloaded cache",
}


@dataclass(frozen=True, kw_only=True)
class BenchRun:
    """One contender's row: medians over its turns, sizes in bytes, times in seconds.

    Attributes:
        name: "hf", "hf-assisted", "hf-offloaded" or "specoffload-PERCENT".
        budget_fraction: device budget / bytes that all KV takes; None for transformers.
        device_budget_bytes: the same in bytes.
        peak_device_bytes: most bytes of KV on the device; transformers: its caches at the end.
        identical: every turn gave the tokens of plain `target.generate`.
        first_difference: index of the first new token that differs; None if identical.
        context: tokens of the prompt.
        threads: threads of one torch operation.
    """

    name: str
    budget_fraction: float | None
    device_budget_bytes: int | None
    peak_device_bytes: int
    identical: bool
    tokens_per_s: float | None
    tokens_per_verify: float | None
    acceptance: float | None
    bytes_up: int
    bytes_down: int
    stall_s: float
    prefill_s: float
    first_difference: int | None
    new_tokens: int
    context: int
    dtype: str
    num_draft_tokens: int | Literal["auto"]
    block_size: int
    repeats: int
    threads: int

    @property
    def label(self) -> str:
        """The name for people."""
        if self.budget_fraction is None:
            return _LABELS[self.name]
        return f"specoffload, {100 * self.budget_fraction:g}% of KV"


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """The rows of a bench, and the runner's own report for the smallest budget."""

    runs: tuple[BenchRun, ...]
    report: RunReport

    def to_json(self) -> str:
        """Return the rows as a JSON list."""
        return json.dumps([asdict(run) for run in self.runs], indent=2) + "\n"

    def table(self) -> str:
        """Return the rows as text in columns."""
        rows = [_COLUMNS, *map(_cells, self.runs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )

    def markdown(self) -> str:
        """Return the rows as a Markdown table."""
        rows = [_COLUMNS, ("---",) * len(_COLUMNS), *map(_cells, self.runs)]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def describe_machine() -> str:
    """Name the processor, the threads and the versions behind every figure."""
    return ", ".join(
        [
            f"{os.cpu_count()} x {processor()}",
            f"{torch.get_num_threads()} torch threads",
            f"Python {platform.python_version()}",
            f"torch {torch.__version__}",
            f"transformers {transformers.__version__}",
            f"numpy {np.__version__}",
        ]
    )


def processor() -> str:
    """Name the processor as the kernel does."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cells(run: BenchRun) -> tuple[str, ...]:
    offloaded = run.budget_fraction is not None
    moved = f"{format_bytes(run.bytes_up)} / {format_bytes(run.bytes_down)}" if offloaded else "-"
    budget = "none" if run.device_budget_bytes is None else format_bytes(run.device_budget_bytes)
    return (
        run.label,
        "yes" if run.identical else f"no, from token {run.first_difference}",
        "-" if run.tokens_per_s is None else f"{run.tokens_per_s:.1f}",
        "-" if run.tokens_per_verify is None else f"{run.tokens_per_verify:.2f}",
        moved,
        f"{format_bytes(run.peak_device_bytes)} / {budget}",
        f"{run.stall_s:.2f} s" if offloaded else "-",
    )
