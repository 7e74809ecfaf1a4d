"""Which transfer engine serves a device."""

from __future__ import annotations

from typing import Any, Final

import torch

from specoffload.tiers.transfer import Mover, ThreadMover

_BOUNCE_BYTES: Final = 8 << 20
"""Size of a pinned buffer between disk and device: some blocks of a large model."""


def mover_for(device: torch.device, *, block_bytes: int) -> Mover[Any]:
    """Return the engine for a device.

    Args:
        device: RAM ("cpu") or a CUDA device.
        block_bytes: size of the largest block.
    """
    if device.type == "cpu":
        return ThreadMover()
    # Only here: a torch without CUDA does all the rest.
    from specoffload.tiers.cuda import CudaStreams
    from specoffload.tiers.stream_mover import StreamMover

    return StreamMover(CudaStreams(device), max(block_bytes, _BOUNCE_BYTES))
