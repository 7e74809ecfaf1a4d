"""Every operation's Triton kernel, interpreted, against its definition; and what is particular."""

from __future__ import annotations

import copy

import pytest
import torch
from kernel_cases import CASES, Case
from torch.utils import _pytree as pytree

import specoffload_kernels as kernels
from specoffload_kernels.gpu import gpu_path
from specoffload_kernels.merge import reference as merge_reference
from specoffload_kernels.merge.triton import MAX_PARTS, merge
from specoffload_kernels.registry import OPERATIONS, Operation

CALLS = [
    pytest.param(operation, case, id=f"{name}: {case.label}")
    for name, operation in OPERATIONS.items()
    if gpu_path(name).kernel is not None
    for case in CASES[name]()
]
TOLERANCE = kernels.ACCURACY[torch.float32]


def tensors_of(*values: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize(("operation", "case"), CALLS)
def test_equals_the_definition(operation: Operation, case: Case) -> None:
    args, kwargs = copy.deepcopy((case.args, case.kwargs))
    expected = operation.flat(operation.reference)(*args, **kwargs)
    got_args, got_kwargs = copy.deepcopy((case.args, case.kwargs))
    kernel = gpu_path(operation.name).kernel
    assert kernel is not None
    got = operation.flat(kernel)(*got_args, **got_kwargs)
    pairs = list(
        zip(tensors_of(got, got_args, got_kwargs), tensors_of(expected, args, kwargs), strict=True)
    )
    assert pairs
    for value, truth in pairs:
        tolerance = max(kernels.ACCURACY[case.dtype], kernels.ACCURACY.get(value.dtype, 0.0))
        torch.testing.assert_close(
            value.double(), truth.double(), rtol=0, atol=tolerance, equal_nan=True
        )
    assert not any(value.isnan().any() for value in tensors_of(got))


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


def test_a_single_part_without_sinks_is_returned_as_it_is() -> None:
    part = parts_of(1)[0]
    assert merge([part]) is part
