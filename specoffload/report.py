"""What a run did, in numbers: a value, as text or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from specoffload.config import format_bytes


@dataclass(frozen=True, kw_only=True)
class BlockShare:
    """One block's part in the last verify: attention mass averaged over a layer's kv heads."""

    row: int
    layer: int
    block: int
    mass: float


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Counts, times and sizes of the runner's last `generate`.

    Times are wall seconds, sizes bytes. Rates are None where nothing was measured.

    Attributes:
        prompt_tokens: prompt tokens of all rows, padding excluded.
        new_tokens: tokens generated over all rows.
        rounds: verify passes.
        row_rounds: verify passes counted once for each row in them.
        drafted_tokens: tokens that the draft proposed.
        accepted_tokens: proposed tokens that the target confirmed.
        tokens_per_s: new tokens after the first, per second after the prefill.
        tokens_per_verify: mean tokens that one verify gives one row (1 is plain decoding).
        acceptance: accepted / drafted.
        prefill_s: until every row has its first token.
        decode_s: from then to the end.
        draft_s: part of `decode_s` spent drafting.
        verify_s: part of `decode_s` spent verifying.
        stall_s: part of all of it spent waiting for a move.
        bytes_up: bytes copied to the device.
        bytes_down: bytes copied from the device.
        blocks_filled: blocks that became full.
        blocks_written: blocks written down; never more than `blocks_filled`.
        device_budget_bytes: the limit, None where there is none.
        device_bytes: bytes of the device arenas.
        peak_device_bytes: most bytes in use at once, staging included; at most `device_bytes`.
        host_bytes: bytes of the host arena.
        disk_bytes: bytes of the spill file.
        engine_bytes: most bytes that the transfer engine itself held at once.
        kv_bytes: bytes that all blocks of the call would take on the device at once.
        kernel: which attention path ran.
        focus: the blocks with the most attention mass in the last verify, sinks and newest
            blocks left out, heaviest first.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    tokens_per_s: float | None = None
    tokens_per_verify: float | None = None
    acceptance: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    stall_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    blocks_filled: int = 0
    blocks_written: int = 0
    device_budget_bytes: int | None = None
    device_bytes: int = 0
    peak_device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    engine_bytes: int = 0
    kv_bytes: int = 0
    kernel: str = ""
    focus: tuple[BlockShare, ...] = field(default=())

    def to_json(self) -> str:
        """Return every field as one JSON object."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        limit = (
            "none" if self.device_budget_bytes is None else format_bytes(self.device_budget_bytes)
        )
        rows = [
            ("tokens", f"{self.new_tokens} new after {self.prompt_tokens} of prompt"),
            ("speed", f"{_rate(self.tokens_per_s)} tokens/s, prefill {self.prefill_s:.2f} s"),
            (
                "speculation",
                f"{_rate(self.tokens_per_verify)} tokens per verify, acceptance "
                f"{_rate(self.acceptance)} of {self.drafted_tokens} drafted",
            ),
            (
                "time",
                f"draft {self.draft_s:.2f} s, verify {self.verify_s:.2f} s,"
                f" stalled {self.stall_s:.2f} s",
            ),
            ("device", f"peak {format_bytes(self.peak_device_bytes)}, budget {limit}"),
            ("KV", f"{format_bytes(self.kv_bytes)} in all"),
            ("moved", f"{format_bytes(self.bytes_up)} up, {format_bytes(self.bytes_down)} down"),
            (
                "below",
                f"host {format_bytes(self.host_bytes)}, disk {format_bytes(self.disk_bytes)},"
                f" engine {format_bytes(self.engine_bytes)}",
            ),
            ("kernel", self.kernel),
        ]
        if self.focus:
            heavy = ", ".join(
                f"layer {s.layer} block {s.block} ({s.mass:.2f})" for s in self.focus[:4]
            )
            rows.append(("focus", heavy))
        return "\n".join(f"{name:<12}{value}" for name, value in rows)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
