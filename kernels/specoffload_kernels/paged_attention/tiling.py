"""Tile sizes, warps and pipeline stages of paged attention on a GPU, and how far to split it.

A table, chosen so that nothing spills and that every NVIDIA GPU since Ampere, and CDNA 3, has the
shared memory: ``make kernels-report`` shows what it compiles to. Nothing in it has been timed.
Knows no torch and no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Vendor = Literal["cuda", "hip"]

MAX_HEAD_DIM = 256
MAX_SPLITS = 128
LISTED_BLOCKS = 1024
"""Table entries of one step of ``present_kernel``."""
COMBINED_SPLITS = 8
"""Splits of one step of ``combine_kernel``."""

_STEPS_OF_A_SPLIT = 4  # fewer would not fill the pipeline
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """One program's share.

    Attributes:
        rows: Packed query rows.
        tokens: Tokens of one step.
        num_warps: Warps of a program.
        num_stages: Of the software pipeline. Two of them go into fetching the slot: 3 and 4 hold
            one tile of K and one of V ahead, 5 two.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, object]:
        """What a launch takes beside the kernel's own arguments."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


# (vendor, bytes of an element, head_dim up to): (rows up to, tokens, warps, stages), in order; the
# last serves all that have more. 16 rows are the fewest that every tensor core takes.
_TABLE: dict[tuple[Vendor, int, int], tuple[tuple[int, int, int, int], ...]] = {
    ("cuda", 2, 128): ((16, 64, 4, 5), (32, 64, 4, 5), (64, 64, 8, 3)),
    ("cuda", 2, 256): ((16, 32, 4, 5), (32, 32, 4, 4), (64, 32, 8, 3)),
    # True float32 products run outside the tensor cores: more warps, so that nothing spills.
    ("cuda", 4, 128): ((16, 32, 8, 5), (32, 32, 8, 4), (64, 32, 8, 3)),
    ("cuda", 4, 256): ((16, 16, 8, 3), (32, 16, 8, 3)),
    ("hip", 2, 128): ((16, 64, 4, 2), (32, 64, 8, 2), (64, 64, 8, 2)),
    ("hip", 2, 256): ((16, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 2)),
    ("hip", 4, 128): ((16, 32, 4, 2), (32, 32, 4, 2), (64, 32, 8, 2)),
    ("hip", 4, 256): ((16, 16, 4, 2), (32, 16, 4, 2)),
}


def tiling(vendor: Vendor, element_bytes: int, head_dim: int, packed_rows: int) -> Tiling:
    """Choose the tile of a call.

    Args:
        vendor: Of the GPU.
        element_bytes: Of the arena or the queries, the larger: 2 or 4.
        head_dim: Up to ``MAX_HEAD_DIM``.
        packed_rows: Query tokens times query heads of a kv head.
    """
    assert head_dim <= MAX_HEAD_DIM
    entries = _TABLE[vendor, element_bytes, 128 if head_dim <= 128 else 256]
    entry = next((entry for entry in entries if packed_rows <= entry[0]), entries[-1])
    rows, tokens, num_warps, num_stages = entry
    return Tiling(rows=rows, tokens=tokens, num_warps=num_warps, num_stages=num_stages)


def num_splits(num_steps: int, num_programs: int, num_processors: int) -> int:
    """Say into how many parts to split a row's blocks.

    Args:
        num_steps: Steps over all blocks of the table, here or not.
        num_programs: Programs of an unsplit call.
        num_processors: Of the GPU.

    Returns:
        Enough to fill the GPU, of at least a few steps each, at most ``MAX_SPLITS``.
    """
    wanted = -(-_PROGRAMS_PER_PROCESSOR * num_processors // max(1, num_programs))
    return max(1, min(wanted, num_steps // _STEPS_OF_A_SPLIT, MAX_SPLITS))
