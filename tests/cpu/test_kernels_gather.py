"""Gathering and scattering of blocks keep every bit and refuse what does not fit."""

from __future__ import annotations

import pytest
import torch

from specoffload_kernels.registry import OPERATIONS

gather_blocks = OPERATIONS["gather_blocks"].overload
scatter_blocks = OPERATIONS["scatter_blocks"].overload

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]


def bits(dtype: torch.dtype, num_slots: int = 6, *shape: int) -> torch.Tensor:
    """Draw slots of every bit pattern, those of NaNs with payloads included."""
    generator = torch.Generator().manual_seed(0)
    width = (shape or (2, 3, 4))[-1] * dtype.itemsize
    size = (num_slots, *(shape or (2, 3, 4))[:-1], width)
    return torch.randint(256, size, dtype=torch.uint8, generator=generator).view(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back_keeps_every_bit(dtype: torch.dtype) -> None:
    arena, run = bits(dtype), torch.zeros_like(bits(dtype, 4))
    slots = torch.tensor([4, 0, 5], dtype=torch.int32)
    gather_blocks(arena, slots, run)
    assert torch.equal(raw(run[:3]), raw(arena)[slots.long()])
    assert raw(run[3]).eq(0).all()
    other = torch.zeros_like(arena)
    scatter_blocks(other, slots, run)
    assert torch.equal(raw(other)[slots.long()], raw(arena)[slots.long()])
    assert raw(other)[[1, 2, 3]].eq(0).all()


def test_views_with_contiguous_slots() -> None:
    wide = bits(torch.bfloat16, 6, 3, 8)
    arena, run = wide[:, 1:], torch.zeros(8, 2, 8, dtype=torch.bfloat16)[::2]
    gather_blocks(arena, torch.tensor([5, 2]), run)
    assert torch.equal(raw(run[:2]), raw(arena)[[5, 2]])


@pytest.mark.parametrize("move", [gather_blocks, scatter_blocks], ids=["gather", "scatter"])
def test_unknown_slots_are_refused_before_anything_is_written(move: object) -> None:
    arena, run = bits(torch.float32), bits(torch.float32, 2).flip(0)
    before = raw(arena).clone(), raw(run).clone()
    with pytest.raises(IndexError, match="slot 6 of an arena of 6"):
        move(arena, torch.tensor([0, 6]), run)
    assert torch.equal(raw(arena), before[0])
    assert torch.equal(raw(run), before[1])


@pytest.mark.parametrize("move", [gather_blocks, scatter_blocks], ids=["gather", "scatter"])
@pytest.mark.parametrize(
    ("arena", "slots", "run"),
    [
        (torch.zeros(4, 6), torch.tensor([0]), torch.zeros(2, 5)),
        (torch.zeros(4, 6), torch.tensor([0]), torch.zeros(2, 6).half()),
        (torch.zeros(4, 6), torch.tensor([0, 1, 2]), torch.zeros(2, 6)),
        (torch.zeros(4, 6), torch.tensor([[0]]), torch.zeros(2, 6)),
        (torch.zeros(4, 6), torch.tensor([0.0]), torch.zeros(2, 6)),
        (torch.zeros(4, 3, 2).transpose(1, 2), torch.tensor([0]), torch.zeros(2, 2, 3)),
    ],
    ids=["shape", "type", "short run", "slots", "slot type", "layout"],
)
def test_misfits_are_refused(
    move: object, arena: torch.Tensor, slots: torch.Tensor, run: torch.Tensor
) -> None:
    with pytest.raises(ValueError, match="must be"):
        move(arena, slots, run)
