"""Small arrays that a pass needs on the device: all of them in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGN = 16


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return arrays as tensors of their types and shapes on a device.

    On the CPU they share the arrays' memory. Elsewhere they are packed into one pinned buffer,
    which the compute stream copies without making the host wait.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = torch.from_numpy(pack(arrays))
    # torch keeps the pinned buffer from being used again until the copy is done.
    return unpack(packed.pin_memory().to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """Return the bytes of arrays one after another, each aligned for any type."""
    packed = np.zeros(sum(_room(array) for array in arrays), np.uint8)
    start = 0
    for array in arrays:
        packed[start : start + array.nbytes] = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        )
        start += _room(array)
    return packed


def unpack(packed: torch.Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """Return views of packed bytes with the types and shapes of the arrays."""
    tensors, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        part = packed[start : start + array.nbytes].view(dtype)
        tensors.append(part.view(array.shape))
        start += _room(array)
    return tensors


def _room(array: npt.NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGN) * _ALIGN
