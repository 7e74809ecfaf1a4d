"""Copies of whole blocks between two arenas in RAM, for threads that do nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specoffload_kernels.selection import selected


def copy_blocks(
    to_SX: npt.NDArray[np.uint8],
    to_slots: npt.NDArray[np.int32],
    from_SX: npt.NDArray[np.uint8],
    from_slots: npt.NDArray[np.int32],
) -> None:
    """Copy slot ``from_slots[i]`` of one arena to slot ``to_slots[i]`` of another.

    One call gives the interpreter lock up once. A copy a block would fight for it with the thread
    that computes, at every block. Takes and returns no tensors: those that inference mode made may
    not be written on another thread.

    Args:
        to_SX: Slots as raw bytes, ``[S, X]``, each slot contiguous; written in place.
        to_slots: int32, ``[n]``; none twice.
        from_SX: Likewise; it may not overlap with what is written.
        from_slots: int32, ``[n]``.

    Raises:
        ValueError: Arenas or slots do not fit each other.
        IndexError: A slot lies outside its arena; nothing was written.
    """
    if (
        to_SX.shape[1:] != from_SX.shape[1:]
        or to_SX.ndim != 2
        or to_slots.shape != from_slots.shape
        or to_slots.dtype != np.int32
        or from_slots.dtype != np.int32
        or (to_SX.strides[1], from_SX.strides[1]) != (1, 1)
    ):
        raise ValueError(
            f"arenas of {to_SX.shape} and {from_SX.shape} bytes [S, X] and slots {to_slots.shape} "
            f"of {to_slots.dtype} and {from_slots.shape} of {from_slots.dtype} [n] do not fit each "
            "other; slots must be int32, and each slot of an arena contiguous"
        )
    library = selected().library
    if library is not None:
        library.copy_blocks(to_SX, to_slots, from_SX, from_slots)
        return
    for slots, arena in ((to_slots, to_SX), (from_slots, from_SX)):
        if len(slots) and (slots.min() < 0 or slots.max() >= len(arena)):
            raise IndexError(f"slots {slots} of an arena of {len(arena)}")
    to_SX[to_slots] = from_SX[from_slots]
