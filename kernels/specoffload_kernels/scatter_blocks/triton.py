"""Scattering of blocks on a GPU."""

from __future__ import annotations

import torch

from specoffload_kernels.gather_blocks.triton import copy_blocks


def scatter_blocks(arena: torch.Tensor, slots_n: torch.Tensor, run: torch.Tensor) -> None:
    """Copy places of the run to slots; see ``specoffload_kernels.scatter_blocks.cpu``.

    A slot that the arena lacks cannot raise here: it stops the device with an assertion.
    """
    copy_blocks(arena, slots_n, run, gather=False)
