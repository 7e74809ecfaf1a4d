"""Counts and times of a call as it runs; `report` makes the value that users read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specoffload.report import BlockShare, RunReport
from specoffload.tiers.device import DeviceMemory
from specoffload.tiers.homes import Homes
from specoffload.tiers.pool import BlockPool


@dataclass
class Meter:
    """What a call did so far. Seconds and bytes; see `RunReport` for each name."""

    new_tokens: int = 0
    first_tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    blocks_filled: int = 0
    blocks_written: int = 0
    device_bytes: int = 0
    peak_device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    kv_bytes: int = 0

    def add_round(
        self, *, rows: int, drafted: int, accepted: int, draft_s: float, verify_s: float
    ) -> None:
        """Add one verify of `rows` rows."""
        self.rounds += 1
        self.row_rounds += rows
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.draft_s += draft_s
        self.verify_s += verify_s

    def add_memory(
        self,
        pools: Sequence[BlockPool],
        homes: Sequence[Homes],
        *,
        device: DeviceMemory,
        kv_bytes: int,
    ) -> None:
        """Add what the pools of one group of rows moved and held; groups run one after another."""
        for pool in pools:
            self.bytes_up += pool.counters.bytes_up
            self.bytes_down += pool.counters.bytes_down
            self.blocks_filled += pool.counters.blocks_filled
            self.blocks_written += pool.counters.blocks_written
        self.peak_device_bytes = max(self.peak_device_bytes, device.peak_bytes)
        self.device_bytes = max(self.device_bytes, device.num_bytes)
        self.host_bytes = max(self.host_bytes, sum(home.host_bytes for home in homes))
        self.disk_bytes = max(self.disk_bytes, sum(home.disk_bytes for home in homes))
        self.kv_bytes = max(self.kv_bytes, kv_bytes)

    def report(
        self,
        *,
        stall_s: float,
        engine_bytes: int,
        prompt_tokens: int,
        device_budget_bytes: int | None,
        kernel: str,
        focus: tuple[BlockShare, ...],
    ) -> RunReport:
        """Return the call as a value."""
        later = self.new_tokens - self.first_tokens
        return RunReport(
            prompt_tokens=prompt_tokens,
            new_tokens=self.new_tokens,
            rounds=self.rounds,
            row_rounds=self.row_rounds,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            tokens_per_s=later / self.decode_s if later and self.decode_s else None,
            tokens_per_verify=(later / self.row_rounds if self.row_rounds else None),
            acceptance=(
                self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None
            ),
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            stall_s=stall_s,
            engine_bytes=engine_bytes,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            blocks_filled=self.blocks_filled,
            blocks_written=self.blocks_written,
            device_budget_bytes=device_budget_bytes,
            device_bytes=self.device_bytes,
            peak_device_bytes=self.peak_device_bytes,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
            kv_bytes=self.kv_bytes,
            kernel=kernel,
            focus=focus,
        )
