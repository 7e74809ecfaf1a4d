"""What one verify saw: attention mass by row, layer, kv head and block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Signal:
    """The target's attention in one verify, over the query rows that were accepted.

    Attributes:
        round_index: the round it was seen in.
        rows: the sequences in the batch, `[row]`.
        mass: softmax mass, `[row, layer, kv_head, block]`, averaged over a kv head's query heads
            and over accepted query rows; sums to 1 over blocks.
        num_tokens: tokens that were attended, the accepted rows' own included, `[row]`.
        num_rows: query rows averaged over, `[row]`.
        block_size: tokens of a block.
    """

    round_index: int
    rows: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float32]
    num_tokens: npt.NDArray[np.int64]
    num_rows: npt.NDArray[np.int64]
    block_size: int


def focus(
    signal: Signal, *, num_sinks: int = 1, num_local: int = 2, count: int = 8
) -> list[tuple[int, int, int, float]]:
    """Return the blocks that hold the most mass, sinks and newest blocks left out.

    Sinks and the local window are heavy in every step and say nothing about where the text looks.

    Args:
        signal: what a verify saw.
        num_sinks: leading blocks to leave out.
        num_local: newest blocks of each row to leave out.
        count: how many to return.

    Returns:
        `(row, layer, block, mass)`, heaviest first; mass is the mean over kv heads.
    """
    mass_RLN = signal.mass.mean(axis=2)
    last = -(-signal.num_tokens // signal.block_size) - num_local
    block = np.arange(mass_RLN.shape[2])
    inner = (block >= num_sinks) & (block < last[:, None])
    mass_RLN = np.where(inner[:, None, :], mass_RLN, 0)
    order = np.argsort(-mass_RLN, axis=None, kind="stable")[:count]
    found = zip(*np.unravel_index(order, mass_RLN.shape), strict=True)
    return [
        (int(signal.rows[row]), int(layer), int(block), float(mass_RLN[row, layer, block]))
        for row, layer, block in found
        if mass_RLN[row, layer, block] > 0
    ]
