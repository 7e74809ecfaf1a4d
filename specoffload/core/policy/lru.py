"""Least recently used: the blocks that no committed token attended for longest go first."""

from __future__ import annotations

import numpy as np

from specoffload.core.residency import Residency, Units


def victims(residency: Residency, candidates: Units, count: int) -> Units:
    """Return the `count` candidates to demote, least recently used first.

    Where full attention uses every block in every round, all are equally recent; ties go to the
    earliest block of the sequence, and the layers take turns so that each streams its fair share.
    """
    _, num_rows, num_blocks = residency.shape
    block = candidates % num_blocks
    layer = candidates // (num_rows * num_blocks)
    order = np.lexsort((layer, block, residency.last_use[candidates]))
    return candidates[order[:count]]
