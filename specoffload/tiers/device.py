"""The device tier: one allocation, carved into an arena for each model.

On a machine without a GPU the device is a piece of RAM of fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specoffload.tiers import ram
from specoffload.tiers.access import COMPUTE, MEMORY, Span, active_log


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """What one block of one model's layer looks like.

    Attributes:
        num_layers: layers that hold KV.
        num_kv_heads: kv heads of a layer.
        head_dim: size of a key and of a value.
        block_size: tokens of a block.
        dtype: how KV is stored.
        windows: the sliding window of each layer in tokens, None where attention is global.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    windows: tuple[int | None, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all kv heads of one layer."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize


class DeviceMemory:
    """The one buffer behind all arenas of a runner; it grows between calls, up to its limit.

    Args:
        device: where it lies.
        limit_bytes: the budget; None for none.

    Attributes:
        peak_bytes: most bytes in use at once since the last `carve`.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        self._device = device
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._used: dict[int, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated now."""
        return self._buffer.numel()

    def carve(self, sizes: Sequence[int], *, num_lent: int = 0) -> list[torch.Tensor]:
        """Return one byte view for each size; earlier views become invalid.

        No two overlap, except that the first is `num_lent` bytes longer: it reaches into the second
        until the second's owner first uses it.
        """
        total = sum(sizes)
        self._used = {}
        self.peak_bytes = 0
        assert self.limit_bytes is None or total <= self.limit_bytes, "the budget is hard"
        if self._buffer.numel() < total:
            # The old buffer goes first: both at once could be twice the budget.
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._buffer = (
                ram.allocate(total)
                if self._device.type == "cpu"
                else torch.empty(total, dtype=torch.uint8, device=self._device)
            )
        views, start = [], 0
        for size in sizes:
            views.append(self._buffer[start : start + size])
            start += size
        views[0] = self._buffer[: sizes[0] + num_lent]
        return views

    def note_use(self, owner: int, num_bytes: int) -> None:
        """Record how many bytes an owner of a view uses from now on."""
        self._used[owner] = num_bytes
        self.peak_bytes = max(self.peak_bytes, sum(self._used.values()))

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)


class DeviceArena:
    """Slots for blocks of one shape.

    Attributes:
        tensor: `[slot, 2 (K, V), kv_head, token, head_dim]`.
        raw: the same as bytes, `[slot, byte]`.

    Args:
        shape: what a block looks like.
        memory: bytes to lay the slots out in; what remains is left alone.
        num_slots: how many.
        poison: fill slots with NaN when they are free.
    """

    def __init__(
        self, shape: KVShape, memory: torch.Tensor, num_slots: int, *, poison: bool = False
    ) -> None:
        size = num_slots * shape.block_bytes
        self.raw = memory[:size].view(num_slots, shape.block_bytes)
        self.tensor = (
            memory[:size]
            .view(shape.dtype)
            .view(num_slots, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        )
        self._poison = poison
        self._block_bytes = shape.block_bytes
        self._log = active_log()
        if poison:
            self._record(np.arange(num_slots), writes=True)
            self.tensor.fill_(torch.nan)

    @property
    def slot_bytes(self) -> npt.NDArray[np.uint8]:
        """Every slot as an array of raw bytes that shares memory with `tensor` (CPU only)."""
        return self.raw.numpy()

    def copy(self, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        """Copy slots to other slots; no slot is in both."""
        if len(source):
            self._record(source, writes=False)
            self._record(target, writes=True)
            self.tensor[self._index(target)] = self.tensor[self._index(source)]

    def freed(self, slots: npt.NDArray[np.int32]) -> None:
        """Note that slots hold nothing any more."""
        if self._poison and len(slots):
            self._record(slots, writes=True)
            self.tensor[self._index(slots)] = torch.nan

    def _index(self, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.tensor.device)

    # ---- for the record of accesses

    def span(self, slots: npt.NDArray[np.integer]) -> Span:
        """Return the memory of some slots."""
        starts = self.raw.data_ptr() + slots.astype(np.int64) * self._block_bytes
        return Span(space=MEMORY, starts=starts, size=self._block_bytes)

    def computes_on(self, table: torch.Tensor, *, writes: bool = False) -> None:
        """Take note that compute reads, or writes, the slots in a table; -1 is none."""
        if self._log is not None:
            slots = np.unique(table.cpu().numpy())
            self._record(slots[slots >= 0], writes=writes)

    def _record(self, slots: npt.NDArray[np.integer], *, writes: bool) -> None:
        if self._log is not None:
            self._log.launch(COMPUTE)
            note = self._log.write if writes else self._log.read
            note(self.span(slots), COMPUTE)
