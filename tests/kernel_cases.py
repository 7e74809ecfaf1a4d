"""Calls of every operation of the kernels package, in the terms of its schema.

Memory that an operation may not read is NaN. `CASES` must name every operation: the tests of the
registry walk over both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import specoffload_kernels as kernels
from specoffload_kernels.registry import Operation


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call.

    Attributes:
        label: what is odd about it.
        args: positional arguments of the schema.
        kwargs: keyword-only arguments of the schema.
        dtype: entry of the table of accuracies that the results are held to.
    """

    label: str
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32

    def drawn(self, device: str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies of the arguments, so that a call may write to them."""
        copies: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            torch.Tensor, lambda x: x.detach().clone().to(device), (self.args, self.kwargs)
        )
        return copies


def tensors_of(*values: object) -> list[torch.Tensor]:
    """Return all tensors within, in their order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def assert_equals_definition(
    operation: Operation, case: Case, path: Callable[..., object], device: str = "cpu"
) -> None:
    """Hold a path, in the terms of the schema, to the definition: results and what it writes."""
    args, kwargs = case.drawn()
    expected = operation.flat(operation.reference)(*args, **kwargs)
    got_args, got_kwargs = case.drawn(device)
    got = path(*got_args, **got_kwargs)
    pairs = list(
        zip(tensors_of(got, got_args, got_kwargs), tensors_of(expected, args, kwargs), strict=True)
    )
    assert pairs
    for value, truth in pairs:
        tolerance = max(kernels.ACCURACY[case.dtype], kernels.ACCURACY.get(value.dtype, 0.0))
        torch.testing.assert_close(
            value.double().cpu(), truth.double(), rtol=0, atol=tolerance, equal_nan=True
        )
    assert not any(value.isnan().any() for value in tensors_of(got))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call of paged attention. Lengths are the tokens stored per row, the queries' included."""

    heads: int = 2
    groups: int = 3
    head_dim: int = 64
    block_size: int = 16
    num_q: int = 5
    lengths: tuple[int, ...] = (130, 77, 5)
    window: int | None = None
    softcap: float | None = None
    absent: tuple[tuple[int, int], ...] = ()  # (row, block)
    dtype: torch.dtype = torch.float32

    def arguments(self, seed: int = 0) -> dict[str, object]:
        """Draw the tensors; memory that no query may see is NaN."""
        generator = torch.Generator().manual_seed(seed)
        num_blocks = max(1, -(-max(self.lengths) // self.block_size))
        rows = len(self.lengths)
        num_slots = rows * num_blocks + 2
        shape = (num_slots, 2, self.heads, self.block_size, self.head_dim)
        arena = torch.randn(shape, generator=generator)
        table = torch.randperm(num_slots, generator=generator)[: rows * num_blocks]
        table = table.view(rows, num_blocks).int()
        kv_len = torch.tensor(self.lengths)
        q_start = (kv_len - self.num_q).clamp(min=0)
        first = q_start - self.window + 1 if self.window else torch.zeros_like(q_start)
        pos = torch.arange(num_blocks * self.block_size).view(num_blocks, self.block_size)
        seen = (pos >= first[:, None, None]) & (pos < kv_len[:, None, None])
        for row, block in self.absent:
            seen[row, block] = False
        readable = torch.zeros(num_slots, self.block_size, dtype=torch.bool)
        readable[table.long()] = seen
        for row, block in self.absent:
            table[row, block] = -1
        arena = arena.masked_fill(~readable[:, None, None, :, None], torch.nan)
        q_shape = (rows, self.num_q, self.heads * self.groups, self.head_dim)
        q = torch.randn(q_shape, generator=generator).transpose(1, 2)
        return {
            "q_BHQD": q.to(self.dtype),
            "arena_S2HTD": arena.to(self.dtype),
            "table_BN": table,
            "q_start_B": q_start,
            "kv_len_B": kv_len,
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
        }


def _poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan)


def _paged_attention() -> Iterator[Case]:
    shapes = {
        "ragged rows, absent blocks": Shape(absent=((0, 0), (0, 3), (2, 0))),
        "odd everything": Shape(heads=1, groups=7, head_dim=20, block_size=7, lengths=(50, 49, 7)),
        "window and softcap": Shape(window=9, softcap=5.0, num_q=17, lengths=(130, 77, 17)),
        "head_dim that no vector divides": Shape(head_dim=6, num_q=1),
        "empty row": Shape(num_q=1, lengths=(0, 40)),
        "no queries": Shape(num_q=0, lengths=(40, 3)),
        "bfloat16": Shape(dtype=torch.bfloat16, head_dim=80),
        "float16": Shape(dtype=torch.float16, num_q=2, lengths=(33, 16)),
    }
    for label, shape in shapes.items():
        arguments = shape.arguments()
        args = tuple(value for value in arguments.values() if isinstance(value, torch.Tensor))
        kwargs = {name: arguments[name] for name in ("scale", "window", "softcap")}
        yield Case(label=label, args=args, kwargs=kwargs, dtype=shape.dtype)
        if shape.num_q == 1:
            bare = {**kwargs, "with_block_lse": False}
            yield Case(label=f"{label}, no sums", args=args, kwargs=bare, dtype=shape.dtype)


def _append() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        k, v = torch.randn((2, 3, 4, 2, 12), generator=generator).transpose(2, 3)
        pos = torch.tensor([[6], [0], [13]]) + torch.arange(4)
        slots = torch.randperm(9, generator=generator).view(3, 3).gather(1, pos // 8)
        slots[1, 2:] = -1
        k[1, :, 2:], v[1, :, 2:] = torch.nan, torch.nan
        arena = _poisoned(9, 2, 2, 8, 12).to(dtype)
        yield Case(label=f"{dtype}, a ragged row", args=(arena, k, v, slots, pos % 8), dtype=dtype)
        args = (arena, k[:, :, :0], v[:, :, :0], slots[:, :0].int(), pos[:, :0].int())
        yield Case(label=f"{dtype}, no tokens", args=args, dtype=dtype)


def _parts(num_parts: int, shape_BHQ: tuple[int, int, int], num_blocks: int) -> list[torch.Tensor]:
    """Stacks of parts over disjoint blocks: out, lse and block_lse; the last row saw nothing."""
    generator = torch.Generator().manual_seed(num_parts)
    num_rows, num_q_heads, num_q = shape_BHQ
    block_lse_PBHQN = torch.randn((num_parts, *shape_BHQ, num_blocks), generator=generator)
    owner_N = torch.arange(num_blocks) % num_parts
    seen_PBHQN = (owner_N == torch.arange(num_parts)[:, None])[:, None, None, None]
    block_lse_PBHQN = block_lse_PBHQN.masked_fill(~seen_PBHQN, -torch.inf)
    block_lse_PBHQN[:, -1] = -torch.inf
    lse_PBHQ = block_lse_PBHQN.logsumexp(-1)
    out_PBQHD = torch.randn((num_parts, num_rows, num_q, num_q_heads, 10), generator=generator)
    out_PBQHD.masked_fill_(lse_PBHQ.isneginf().transpose(2, 3)[..., None], 0.0)
    return [out_PBQHD, lse_PBHQ, block_lse_PBHQN]


def _merge() -> Iterator[Case]:
    for num_parts, num_blocks in ((1, 3), (2, 7), (5, 3)):
        fields = [list(stack) for stack in _parts(num_parts, (3, 6, 4), num_blocks)]
        sinks = {"sinks_H": torch.linspace(-3, 3, 6)}
        yield Case(label=f"{num_parts} parts", args=tuple(fields))
        yield Case(label=f"{num_parts} parts, sinks", args=tuple(fields), kwargs={**sinks})
        yield Case(label=f"{num_parts} parts, no sums", args=(fields[0], fields[1], []))


def _block_mass() -> Iterator[Case]:
    stacks = _parts(2, (3, 6, 4), 7)
    num_rows = torch.tensor([4, 0, 3])
    for label, block_lse, lse in (
        ("one layer", stacks[2][0], stacks[1][0]),
        ("layers", stacks[2], stacks[1]),
        ("no layers", stacks[2][:0], stacks[1][:0]),
        ("no blocks", stacks[2][0, ..., :0], stacks[1][0]),
    ):
        block_lse, lse = block_lse.clone(), lse.clone()
        for unused in (block_lse[..., 1, :, :, :], block_lse[..., 2, :, 3:, :], lse[..., 1, :, :]):
            unused.fill_(torch.nan)
        yield Case(label=label, args=(block_lse, lse, 2, num_rows))


def arena_of_keys(
    num_tokens: list[int],
    *,
    heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw blocks of which so many tokens are filled; all else, values included, is NaN.

    Returns the arena and each block's slot; one slot is nobody's. Channels differ in level and
    spread, as those of real keys do; in the first head one channel is constant.
    """
    generator = torch.Generator().manual_seed(seed)
    num_slots = len(num_tokens) + 1
    arena = _poisoned(num_slots, 2, heads, block_size, head_dim)
    slots = torch.randperm(num_slots, generator=generator)[: len(num_tokens)]
    level, spread = torch.rand((2, heads, 1, head_dim), generator=generator)
    spread[0, 0, 0] = 0.0
    for slot, filled in zip(slots.tolist(), num_tokens, strict=True):
        noise = torch.randn((heads, filled, head_dim), generator=generator)
        arena[slot, 0, :, :filled] = level + spread * noise
    return arena.to(dtype), slots


DIGEST_SHAPES = {
    "4 bits": {"heads": 2, "block_size": 16, "head_dim": 16, "dtype": torch.float32},
    "3 bits, odd shapes": {"heads": 3, "block_size": 7, "head_dim": 20, "dtype": torch.float32},
    "2 bits, bfloat16": {"heads": 1, "block_size": 16, "head_dim": 24, "dtype": torch.bfloat16},
    "8 bits, float16": {"heads": 2, "block_size": 5, "head_dim": 12, "dtype": torch.float16},
    "4 bits, large": {"heads": 1, "block_size": 100, "head_dim": 40, "dtype": torch.float32},
    "0 bits, one token": {"heads": 2, "block_size": 1, "head_dim": 6, "dtype": torch.float32},
}


def _digest() -> Iterator[Case]:
    for label, shape in DIGEST_SHAPES.items():
        block_size = shape["block_size"]
        num_tokens = [block_size, 1, 0, block_size // 2, block_size]
        arena, slots = arena_of_keys(num_tokens, **shape)
        slots[4] = -1
        kwargs = {"bits": int(label[0])}
        for index in (torch.int32, torch.int64):
            args = (arena, slots.to(index), torch.tensor(num_tokens).to(index))
            yield Case(label=f"{label}, {index}", args=args, kwargs=kwargs, dtype=shape["dtype"])
        args = (arena, slots[:0], slots[:0])
        yield Case(label=f"{label}, no slots", args=args, kwargs=kwargs, dtype=shape["dtype"])


def _digest_score() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for label, shape in DIGEST_SHAPES.items():
        block_size, head_dim = shape["block_size"], shape["head_dim"]
        # Two blocks of each row are absent. Then row 0 has three, the last of which has grown since
        # its digest was made; row 1 has two, the last not full; and row 2 has none.
        num_tokens = [block_size, block_size, block_size // 2, block_size, (block_size + 1) // 2]
        arena, slots = arena_of_keys(num_tokens, **shape)
        fields = list(
            kernels.digest(arena, slots, torch.tensor(num_tokens), bits=int(label[0])).tensors
        )
        unused = torch.arange(block_size) >= fields[5][:, None]
        fields[4] = fields[4].masked_fill(unused[:, None], torch.nan)
        nobody = [torch.full_like(x[:1], 255 if x.dtype == torch.uint8 else 0) for x in fields]
        for entry in nobody[:3] + nobody[4:5]:
            entry.fill_(torch.nan)
        fields = [torch.cat(pair) for pair in zip(nobody, fields, strict=True)]
        table = torch.tensor([[1, 2, 3], [4, 5, -1], [-1, -1, -1]], dtype=torch.int32)
        table = torch.nn.functional.pad(table, (2, 0), value=-1)
        kv_len = torch.tensor([5 * block_size, 3 * block_size + num_tokens[4], 0])
        q = torch.randn((3, 3, 2 * shape["heads"], head_dim), generator=generator).transpose(1, 2)
        args = (q.to(shape["dtype"]), *fields, table, (kv_len - 3).clamp(min=0), kv_len)
        for rule in kernels.DigestRule:
            for window, softcap in ((None, None), (block_size, 2.0)):
                yield Case(
                    label=f"{label}, {rule.value}, window {window}",
                    args=args,
                    kwargs={
                        "rule": rule.value,
                        "scale": head_dim**-0.5,
                        "window": window,
                        "softcap": softcap,
                    },
                    dtype=shape["dtype"],
                )
        empty = (*args[:7], table[:, :0], *args[8:])
        yield Case(label=f"{label}, no blocks", args=empty, kwargs={"rule": "shadow", "scale": 1.0})


def _copied_blocks() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        arena = torch.randn((7, 2, 1, 3, 5), generator=generator).to(dtype)
        arena[4] = torch.nan
        slots = torch.tensor([5, 0, -1, 6])
        run = _poisoned(5, *arena.shape[1:]).to(dtype)
        run[0], run[3] = 1.0, 2.0
        yield Case(label=f"{dtype}, a gap", args=(arena, slots, run), dtype=dtype)
        yield Case(label=f"{dtype}, no slots", args=(arena, slots[:0].int(), run), dtype=dtype)


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "paged_attention": _paged_attention,
    "append": _append,
    "merge": _merge,
    "block_mass": _block_mass,
    "digest": _digest,
    "digest_score": _digest_score,
    "gather_blocks": _copied_blocks,
    "scatter_blocks": _copied_blocks,
}
"""What draws the calls of an operation, by its name."""


def within_larger_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the same call on views with gaps between and around what it may read."""
    arena, table, q = (arguments[name] for name in ("arena_S2HTD", "table_BN", "q_BHQD"))
    wide = torch.full((arena.shape[0], 3, arena.shape[2] + 1, *arena.shape[3:]), torch.nan)
    wide[:, 1:, 1:] = arena
    gappy = torch.full((table.shape[0], 2 * table.shape[1]), -1, dtype=torch.int32)
    gappy[:, ::2] = table
    return {
        **arguments,
        "arena_S2HTD": wide[:, 1:, 1:],
        "table_BN": gappy[:, ::2],
        "q_BHQD": torch.cat([q, q], -1)[..., q.shape[-1] :],
        "q_start_B": arguments["q_start_B"].repeat_interleave(2)[::2],
    }
