"""Merging parts gives the attention over their union; masses sum to 1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specoffload_kernels as kernels
from specoffload_kernels.block_mass import reference as mass_reference
from specoffload_kernels.merge import reference as merge_reference

ROWS, HEADS, Q_HEADS, NUM_Q, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 2, 6, 4, 16, 8, 5
TOLERANCE = kernels.ACCURACY[torch.float32]


def attend(owner_of_block: list[int], owner: int) -> kernels.AttentionPart:
    """Attention over the blocks of one owner; row 2 is so short that it sees one block."""
    generator = torch.Generator().manual_seed(0)
    num_slots = ROWS * NUM_BLOCKS
    arena = torch.randn((num_slots, 2, HEADS, BLOCK_SIZE, HEAD_DIM), generator=generator)
    q = torch.randn((ROWS, Q_HEADS, NUM_Q, HEAD_DIM), generator=generator)
    table = torch.arange(num_slots, dtype=torch.int32).view(ROWS, NUM_BLOCKS)
    owned = torch.tensor(owner_of_block) == owner
    kv_len = torch.tensor([40, 33, 7])
    table = table.masked_fill(~owned, -1)
    return kernels.paged_attention(q, arena, table, kv_len - NUM_Q, kv_len, scale=0.25)


@pytest.mark.parametrize("backend", kernels.available_backends())
@given(owners=st.lists(st.integers(0, 3), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS))
def test_parts_merge_to_the_whole(backend: str, owners: list[int]) -> None:
    with kernels.forced_backend(backend):
        whole = attend([0] * NUM_BLOCKS, 0)
        merged = kernels.merge([attend(owners, owner) for owner in range(4)])
    torch.testing.assert_close(merged.out_BQHD, whole.out_BQHD, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(merged.lse_BHQ, whole.lse_BHQ, rtol=0, atol=TOLERANCE)
    assert merged.out_BQHD.is_contiguous()
    assert merged.block_lse_BHQN is not None
    assert torch.equal(merged.block_lse_BHQN, whole.block_lse_BHQN)


@pytest.mark.parametrize("backend", kernels.available_backends())
@pytest.mark.parametrize("num_parts", [1, 2])
def test_sinks_dilute_the_output_alone(backend: str, num_parts: int) -> None:
    parts = [attend([0, 1, 0, 1, 1], owner) for owner in range(num_parts)]
    sinks = torch.linspace(-3, 3, Q_HEADS)
    with kernels.forced_backend(backend):
        merged = kernels.merge(parts, sinks_H=sinks)
        undiluted = kernels.merge(parts)
    expected = merge_reference.merge(parts, sinks_H=sinks)
    torch.testing.assert_close(merged.out_BQHD, expected.out_BQHD.float(), rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(merged.lse_BHQ, expected.lse_BHQ.float(), rtol=0, atol=TOLERANCE)
    assert torch.equal(merged.lse_BHQ, undiluted.lse_BHQ)
    assert merged.out_BQHD.abs().sum() < undiluted.out_BQHD.abs().sum()


@pytest.mark.parametrize("backend", kernels.available_backends())
@pytest.mark.parametrize("sinks", [None, torch.zeros(Q_HEADS)])
def test_nothing_merges_to_nothing(backend: str, sinks: torch.Tensor | None) -> None:
    empty = attend([0] * NUM_BLOCKS, 1)
    with kernels.forced_backend(backend):
        merged = kernels.merge([empty, empty], sinks_H=sinks)
    assert merged.out_BQHD.eq(0).all()
    assert merged.lse_BHQ.isneginf().all()


def test_merge_leaves_its_parts_alone() -> None:
    parts = [attend([0, 1, 0, 1, 1], owner) for owner in range(2)]
    before = [part.out_BQHD.clone() for part in parts]
    kernels.merge(parts, sinks_H=torch.zeros(Q_HEADS))
    assert all(torch.equal(a, part.out_BQHD) for a, part in zip(before, parts, strict=True))


def test_sums_are_dropped_unless_every_part_has_them() -> None:
    part = attend([0] * NUM_BLOCKS, 0)
    bare = kernels.AttentionPart(out_BQHD=part.out_BQHD, lse_BHQ=part.lse_BHQ, block_lse_BHQN=None)
    assert kernels.merge([part, bare]).block_lse_BHQN is None


def test_merge_of_no_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        kernels.merge([])


@given(
    num_rows=st.lists(st.integers(0, NUM_Q), min_size=ROWS, max_size=ROWS),
    owners=st.lists(st.integers(0, 1), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    layers=st.integers(0, 2),
)
def test_masses_equal_their_definition(num_rows: list[int], owners: list[int], layers: int) -> None:
    part = attend(owners, 0)
    assert part.block_lse_BHQN is not None
    block_lse, lse = part.block_lse_BHQN, part.lse_BHQ
    if layers:
        block_lse, lse = torch.stack([block_lse] * layers), torch.stack([lse] * layers)
    mass = kernels.block_mass(block_lse, lse, HEADS, torch.tensor(num_rows))
    expected = mass_reference.block_mass(block_lse, lse, HEADS, torch.tensor(num_rows))
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass, expected.float(), rtol=0, atol=TOLERANCE)


def test_masses_sum_to_one_where_rows_are_used() -> None:
    part = attend([0] * NUM_BLOCKS, 0)
    assert part.block_lse_BHQN is not None
    mass = kernels.block_mass(part.block_lse_BHQN, part.lse_BHQ, HEADS, torch.tensor([4, 0, 1]))
    expected = torch.tensor([1.0, 0.0, 1.0])[:, None].expand(ROWS, HEADS)
    torch.testing.assert_close(mass.sum(-1), expected, rtol=0, atol=TOLERANCE)


def test_mass_of_a_misfitting_group_is_refused() -> None:
    part = attend([0] * NUM_BLOCKS, 0)
    assert part.block_lse_BHQN is not None
    with pytest.raises(ValueError, match="multiple"):
        kernels.block_mass(part.block_lse_BHQN, part.lse_BHQ, 4, torch.tensor([1, 1, 1]))
