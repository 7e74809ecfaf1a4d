"""From raw attention signals to block scores: numpy in, numpy out.

Knows nothing of models, tiers or moves, and imports no torch.
"""

from specoffload_fusion.signal import Signal, focus

__all__ = ["Signal", "focus"]
