"""How a call's memory is split between target, draft, staging and the tiers below.

Pure arithmetic on block counts. The draft is served first: it reads its whole cache once for every
drafted token, the target once a round, so a slot saves the draft several times the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from specoffload.config import format_bytes
from specoffload.errors import BudgetError

_MAX_STAGING_HALF = 16
_STAGING_SHARE = 24
"""One half of the staging area is at most this fraction of a pool's slots."""


def span_blocks(num_tokens: int, block_size: int) -> int:
    """Return the most blocks that `num_tokens` neighbouring tokens can touch."""
    return (num_tokens + block_size - 2) // block_size + 1 if num_tokens else 0


@dataclass(frozen=True, kw_only=True)
class Need:
    """What one model's KV takes in a call, in blocks (of one layer of one row).

    Attributes:
        block_bytes: bytes of a block.
        total: blocks that hold everything at the end of the call.
        working: blocks that must be on the device at once.
    """

    block_bytes: int
    total: int
    working: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.total * self.block_bytes

    @property
    def minimum_bytes(self) -> int:
        """The least device memory that the model can run in, streaming all that is not working."""
        staging = 0 if self.total <= self.working else 2
        return (min(self.working, self.total) + staging) * self.block_bytes


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one model gets, in blocks.

    Attributes:
        num_slots: device slots that blocks can stay in.
        num_staging: device slots that blocks pass through; 0 where everything fits.
        num_host_slots: places in host memory.
        num_extents: places in the spill file.
    """

    num_slots: int
    num_staging: int
    num_host_slots: int
    num_extents: int


def split(
    needs: list[Need], *, device_bytes: int | None, host_bytes: int, has_disk: bool
) -> list[Share]:
    """Split the budgets over the models; the target is first, the draft, if any, second.

    Raises:
        BudgetError: the device cannot hold the working sets, or the tiers together cannot hold
            everything.
    """
    total_bytes = sum(need.total_bytes for need in needs)
    if device_bytes is None or total_bytes <= device_bytes:
        return [
            Share(num_slots=need.total, num_staging=0, num_host_slots=0, num_extents=0)
            for need in needs
        ]
    minimum = sum(need.minimum_bytes for need in needs)
    if minimum > device_bytes:
        raise BudgetError(
            f"device_budget={format_bytes(device_bytes)} ({device_bytes} bytes) cannot hold one"
            f" working set: at least {minimum} bytes are needed; raise it, or lower block_size or"
            " num_draft_tokens",
            required_bytes=minimum,
        )
    spare = device_bytes - minimum
    slots: list[int] = []
    for need in reversed(needs):
        minimum_slots = need.minimum_bytes // need.block_bytes
        granted = min(minimum_slots + spare // need.block_bytes, need.total)
        # A pool that fits whole needs no staging; its minimum had counted some.
        granted = max(granted, minimum_slots)
        spare -= (granted - minimum_slots) * need.block_bytes
        slots.insert(0, granted)
    shares: list[Share] = []
    host_left = host_bytes
    for need, granted in zip(needs, slots, strict=True):
        if granted >= need.total:
            shares.append(
                Share(num_slots=need.total, num_staging=0, num_host_slots=0, num_extents=0)
            )
            continue
        half = max(1, min(_MAX_STAGING_HALF, granted // _STAGING_SHARE))
        half = min(half, (granted - need.working) // 2)
        resident = granted - 2 * half
        host_slots = min(need.total, host_left // need.block_bytes)
        host_left -= host_slots * need.block_bytes
        extents = need.total - host_slots if has_disk else 0
        if not has_disk and host_slots < need.total - resident:
            lacking = (need.total - resident - host_slots) * need.block_bytes
            raise BudgetError(
                f"device_budget={format_bytes(device_bytes)} and host_budget="
                f"{format_bytes(host_bytes)} cannot hold {format_bytes(total_bytes)} of KV:"
                f" {lacking} bytes have no place; raise host_budget by that, or set disk_path",
                required_bytes=host_bytes + lacking,
            )
        shares.append(
            Share(
                num_slots=resident,
                num_staging=2 * half,
                num_host_slots=host_slots,
                num_extents=extents,
            )
        )
    return shares
