"""How memory is split: never more than the budget, never less than a working set."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.core.budget import Need, span_blocks, split
from specoffload.errors import BudgetError

needs = st.builds(
    lambda block_bytes, working, more: Need(
        block_bytes=block_bytes, total=working + more, working=working
    ),
    st.sampled_from([512, 2048, 98304]),
    st.integers(1, 200),
    st.integers(0, 3000),
)


@given(
    models=st.lists(needs, min_size=1, max_size=2),
    fraction=st.floats(0, 1.5),
    host=st.integers(0, 10**8),
    has_disk=st.booleans(),
)
def test_budgets_are_hard_and_everything_has_a_place(
    models: list[Need], fraction: float, host: int, has_disk: bool
) -> None:
    device = int(sum(need.total_bytes for need in models) * fraction)
    minimum = sum(need.minimum_bytes for need in models)
    if device < min(minimum, sum(need.total_bytes for need in models)):
        with pytest.raises(BudgetError) as refused:
            split(models, device_bytes=device, host_bytes=host, has_disk=has_disk)
        assert refused.value.required_bytes == minimum
        device = minimum
    shares = split(models, device_bytes=device, host_bytes=host, has_disk=True)
    if not has_disk and any(share.num_extents for share in shares):
        lacking = [
            (need.total - share.num_slots - share.num_host_slots) * need.block_bytes
            for need, share in zip(models, shares, strict=True)
        ]
        if max(lacking) > 0:
            with pytest.raises(BudgetError) as refused:
                split(models, device_bytes=device, host_bytes=host, has_disk=False)
            assert refused.value.required_bytes > host
            return
        shares = split(models, device_bytes=device, host_bytes=host, has_disk=False)
    used = host_used = 0
    for need, share in zip(models, shares, strict=True):
        used += (share.num_slots + share.num_staging) * need.block_bytes
        host_used += share.num_host_slots * need.block_bytes
        assert share.num_slots >= need.working
        assert share.num_staging % 2 == 0
        if share.num_staging == 0:
            assert share.num_slots == need.total
        homes = share.num_host_slots + share.num_extents
        assert share.num_slots + homes >= need.total
        assert has_disk or not share.num_extents
    assert used <= device
    assert host_used <= host


def test_the_target_may_use_the_draft_s_memory_until_the_draft_starts() -> None:
    target = Need(block_bytes=1000, total=1000, working=10)
    draft = Need(block_bytes=300, total=100, working=4)
    target_share, draft_share = split(
        [target, draft], device_bytes=200_000, host_bytes=0, has_disk=True
    )
    draft_bytes = (draft_share.num_slots + draft_share.num_staging) * 300
    assert draft_bytes - 1000 < target_share.num_lent * 1000 <= draft_bytes
    assert draft_share.num_lent == 0


def test_everything_fits_without_a_budget() -> None:
    need = Need(block_bytes=512, total=100, working=10)
    (share,) = split([need], device_bytes=None, host_bytes=0, has_disk=False)
    assert (share.num_slots, share.num_staging, share.num_extents) == (100, 0, 0)


def test_the_draft_is_served_first() -> None:
    target = Need(block_bytes=1000, total=1000, working=10)
    draft = Need(block_bytes=1000, total=100, working=4)
    shares = split([target, draft], device_bytes=300_000, host_bytes=0, has_disk=True)
    assert shares[1].num_slots == draft.total
    assert shares[1].num_staging == 0
    assert shares[0].num_slots + shares[0].num_staging == 200


@given(
    num_tokens=st.integers(1, 200),
    block_size=st.sampled_from([1, 4, 16, 64]),
    at=st.integers(0, 500),
)
def test_span_is_the_worst_case_over_offsets(num_tokens: int, block_size: int, at: int) -> None:
    touched = (at + num_tokens - 1) // block_size - at // block_size + 1
    assert touched <= span_blocks(num_tokens, block_size)
    worst = max(
        (start + num_tokens - 1) // block_size - start // block_size + 1
        for start in range(block_size)
    )
    assert worst == span_blocks(num_tokens, block_size)
