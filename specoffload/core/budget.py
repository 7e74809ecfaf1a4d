"""How a call's memory is split between target, draft, staging and the tiers below.

Pure arithmetic on block counts. The draft is served first: it reads its whole cache once for every
drafted token, the target once a round, so a slot saves the draft several times the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specoffload.config import format_bytes
from specoffload.errors import BudgetError

_STAGING_HALF = 16
"""Blocks in one half of the staging area, where there is room for it: enough to make a load worth
its start, few enough to leave the budget to blocks that stay."""
_STAGING_PART = 8
"""Beyond the minimum, staging takes at most one part in this many of what is spare."""


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
        num_lent: slots more that the model may use until the other one starts.
    """

    num_slots: int
    num_staging: int = 0
    num_host_slots: int = 0
    num_extents: int = 0
    num_lent: int = 0


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
        return [Share(num_slots=need.total) for need in needs]
    minimum = sum(need.minimum_bytes for need in needs)
    if minimum > device_bytes:
        raise BudgetError(
            f"device_budget={format_bytes(device_bytes)} ({device_bytes} bytes) cannot hold one"
            f" working set: at least {minimum} bytes are needed; raise it, or lower block_size or"
            " num_draft_tokens",
            required_bytes=minimum,
        )
    on_device = _split_device(needs, device_bytes - minimum)
    lacking = [
        max(0, need.total - slots) for need, (slots, _) in zip(needs, on_device, strict=True)
    ]
    required = sum(blocks * need.block_bytes for blocks, need in zip(lacking, needs, strict=True))
    if required > host_bytes and not has_disk:
        raise BudgetError(
            f"device_budget={format_bytes(device_bytes)} and host_budget="
            f"{format_bytes(host_bytes)} cannot hold {format_bytes(total_bytes)} of KV: host_budget"
            f" must be at least {required} bytes; raise it, or set disk_path",
            required_bytes=required,
        )
    shares: list[Share] = []
    # What has no other place comes first, then whatever else can be kept in host memory.
    reserved = 0 if has_disk else required
    for need, (slots, staging), blocks in zip(needs, on_device, lacking, strict=True):
        if not staging:
            shares.append(Share(num_slots=need.total))
            continue
        own = 0 if has_disk else blocks * need.block_bytes
        host_slots = min(need.total, (host_bytes - reserved + own) // need.block_bytes)
        reserved -= own
        host_bytes -= host_slots * need.block_bytes
        extents = need.total - host_slots if has_disk else 0
        shares.append(
            Share(
                num_slots=slots,
                num_staging=staging,
                num_host_slots=host_slots,
                num_extents=extents,
            )
        )
    return _with_loan(needs, shares)


def _split_device(needs: list[Need], spare: int) -> list[tuple[int, int]]:
    """Return slots and staging slots of each model; `spare` is what the minimum leaves."""
    staging = []
    for need in needs:
        pairs = 0
        if need.total > need.working:
            pairs = min(_STAGING_HALF - 1, spare // _STAGING_PART // (2 * need.block_bytes))
            spare -= pairs * 2 * need.block_bytes
            pairs += 1
        staging.append(2 * pairs)
    granted: list[tuple[int, int]] = []
    for need, through in zip(reversed(needs), reversed(staging), strict=True):
        slots = min(need.working, need.total)
        lacking = need.total - slots
        # Whoever fits whole needs no staging, and can stay in its slots instead.
        if lacking * need.block_bytes <= spare + through * need.block_bytes:
            spare -= (lacking - through) * need.block_bytes
            granted.insert(0, (need.total, 0))
            continue
        more = spare // need.block_bytes
        spare -= more * need.block_bytes
        granted.insert(0, (slots + more, through))
    return granted


def _with_loan(needs: list[Need], shares: list[Share]) -> list[Share]:
    """Let the target use the draft's memory while it reads the prompt: the draft starts later."""
    if len(shares) < 2 or not shares[0].num_staging:
        return shares
    draft_bytes = (shares[1].num_slots + shares[1].num_staging) * needs[1].block_bytes
    lent = draft_bytes // needs[0].block_bytes
    return [replace(shares[0], num_lent=lent), *shares[1:]]
