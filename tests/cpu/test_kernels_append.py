"""Append against its definition: it writes the tokens that have a slot, and nothing else."""

from __future__ import annotations

import pytest
import torch

import specoffload_kernels as kernels
from specoffload_kernels.append import reference


@pytest.mark.parametrize("backend", kernels.available_backends())
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("skipped", [(), ((0, 0),), ((1, 2), (1, 3)), "all"])
def test_writes_what_the_definition_writes(
    backend: str, index: torch.dtype, dtype: torch.dtype, skipped: object
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, heads, num_q, head_dim, block_size = 3, 2, 4, 12, 8
    arena = torch.randn((9, 2, heads, block_size, head_dim), generator=generator).to(dtype)
    k, v = torch.randn((2, rows, num_q, heads, head_dim), generator=generator).transpose(2, 3)
    pos = torch.tensor([[6], [0], [13]]) + torch.arange(num_q)
    slots = torch.randperm(9, generator=generator).view(rows, 3).gather(1, pos // block_size)
    if skipped == "all":
        slots.fill_(-1)
    else:
        for row, i in skipped:
            slots[row, i] = -1
    arguments = (k, v, slots.to(index), (pos % block_size).to(index))

    expected = arena.clone()
    reference.append(expected, *arguments)
    with kernels.forced_backend(backend):
        kernels.append(arena, *arguments)
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("backend", kernels.available_backends())
def test_writes_through_a_view(backend: str) -> None:
    store = torch.zeros(4, 3, 3, 8, 6)
    arena = store[1:, :2, 1:]
    k, v = torch.ones(1, 2, 1, 6), torch.full((1, 2, 1, 6), 2.0)
    with kernels.forced_backend(backend):
        kernels.append(arena, k, v, torch.tensor([[2]]), torch.tensor([[5]]))
    assert store[3, 0, 1:, 5].eq(1).all()
    assert store[3, 1, 1:, 5].eq(2).all()
    assert store.count_nonzero() == 2 * 2 * 6


@pytest.mark.parametrize("backend", kernels.available_backends())
@pytest.mark.parametrize(("slot", "offset"), [(4, 0), (0, 8), (0, -1)])
def test_places_outside_the_arena_are_refused(backend: str, slot: int, offset: int) -> None:
    arena = torch.zeros(4, 2, 2, 8, 6)
    k = torch.ones(1, 2, 1, 6)
    with kernels.forced_backend(backend), pytest.raises(IndexError):
        kernels.append(arena, k, k, torch.tensor([[slot]]), torch.tensor([[offset]]))
    assert arena.eq(0).all()


@pytest.mark.parametrize("backend", kernels.available_backends())
def test_other_types_are_converted(backend: str) -> None:
    arena = torch.zeros(1, 2, 1, 4, 8, dtype=torch.bfloat16)
    k = torch.full((1, 1, 1, 8), 1.001)
    with kernels.forced_backend(backend):
        kernels.append(arena, k, k, torch.tensor([[0]]), torch.tensor([[3]]))
    assert arena[..., 3, :].eq(1).all()


def test_misfits_are_refused() -> None:
    arena = torch.zeros(4, 2, 2, 8, 6)
    k = torch.ones(1, 2, 3, 6)
    index = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="must fit"):
        kernels.append(arena, k, k, index, index)
