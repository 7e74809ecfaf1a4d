"""Every operation's Triton kernel, interpreted, against its definition; and what is particular."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CASES, Case, assert_equals_definition

import specoffload_kernels as kernels
from specoffload_kernels.gather_blocks.triton import gather_blocks
from specoffload_kernels.gpu import gpu_path
from specoffload_kernels.merge import reference as merge_reference
from specoffload_kernels.merge.triton import MAX_PARTS, merge
from specoffload_kernels.registry import OPERATIONS, Operation
from specoffload_kernels.scatter_blocks.triton import scatter_blocks

CALLS = [
    pytest.param(operation, case, id=f"{name}: {case.label}")
    for name, operation in OPERATIONS.items()
    if gpu_path(name).kernel is not None
    for case in CASES[name]()
]
TOLERANCE = kernels.ACCURACY[torch.float32]


@pytest.mark.parametrize(("operation", "case"), CALLS)
def test_equals_the_definition(operation: Operation, case: Case) -> None:
    kernel = gpu_path(operation.name).kernel
    assert kernel is not None
    assert_equals_definition(operation, case, operation.flat(kernel))


def parts_of(num_parts: int, *, num_blocks: int = 3) -> list[kernels.AttentionPart]:
    """Draw parts [1 row, 2 query tokens, 3 heads, D 10]; every third is empty, with junk in out."""
    generator = torch.Generator().manual_seed(num_parts)
    parts = []
    for index in range(num_parts):
        lse_BHQ = 3 * torch.randn((1, 3, 2), generator=generator)
        out_BQHD = torch.randn((1, 2, 3, 10), generator=generator)
        block_lse_BHQN = torch.full((1, 3, 2, num_blocks), -torch.inf)
        if index % 3 == 2:
            lse_BHQ.fill_(-torch.inf)
        else:
            block_lse_BHQN[..., index % num_blocks] = lse_BHQ
        parts.append(
            kernels.AttentionPart(out_BQHD=out_BQHD, lse_BHQ=lse_BHQ, block_lse_BHQN=block_lse_BHQN)
        )
    return parts


@pytest.mark.parametrize("sinks_H", [None, torch.linspace(-3, 3, 3)], ids=["", "sinks"])
@pytest.mark.parametrize("num_parts", [MAX_PARTS, MAX_PARTS + 1, 2 * MAX_PARTS + 3])
def test_many_parts_merge(num_parts: int, sinks_H: torch.Tensor | None) -> None:
    parts = parts_of(num_parts, num_blocks=num_parts)
    got, expected = merge(parts, sinks_H=sinks_H), merge_reference.merge(parts, sinks_H=sinks_H)
    for name, truth in vars(expected).items():
        torch.testing.assert_close(getattr(got, name), truth.float(), rtol=0, atol=TOLERANCE)


def test_many_block_sums_merge() -> None:
    parts = parts_of(2, num_blocks=700)
    got, expected = merge(parts).block_lse_BHQN, merge_reference.merge(parts).block_lse_BHQN
    assert got is not None
    assert expected is not None
    assert torch.equal(got, expected.float())


@pytest.mark.parametrize("sinks_H", [None, torch.zeros(3)], ids=["", "sinks"])
def test_nothing_merges_to_nothing(sinks_H: torch.Tensor | None) -> None:
    empty = parts_of(3)[2]
    got = merge([empty, empty], sinks_H=sinks_H)
    assert got.out_BQHD.eq(0).all()
    assert got.lse_BHQ.isneginf().all()


def test_sums_are_dropped_unless_every_part_has_them() -> None:
    part = parts_of(1)[0]
    bare = kernels.AttentionPart(out_BQHD=part.out_BQHD, lse_BHQ=part.lse_BHQ, block_lse_BHQN=None)
    assert merge([part, bare]).block_lse_BHQN is None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_there_and_back_keeps_every_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    size = (6, 3, 2500 * dtype.itemsize)  # more than one program's stretch
    arena = torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)
    slots = torch.tensor([4, -1, 0, 5], dtype=torch.int32)
    run, other = torch.zeros_like(arena), torch.zeros_like(arena)
    gather_blocks(arena, slots, run)
    scatter_blocks(other, slots, run)
    arena, run, other = (tensor.view(torch.uint8) for tensor in (arena, run, other))
    assert torch.equal(run[[0, 2, 3]], arena[[4, 0, 5]])
    assert run[[1, 4, 5]].eq(0).all()
    assert torch.equal(other[[4, 0, 5]], arena[[4, 0, 5]])
    assert other[1:4].eq(0).all()
