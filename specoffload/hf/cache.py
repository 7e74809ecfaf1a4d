"""The `Cache` that a model sees: it stores nothing itself, it passes new KV on to the pool."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from specoffload.errors import UnsupportedModelError
from specoffload.hf.attention import PASS_KEY
from specoffload.tiers.device import KVShape
from specoffload.tiers.forward import ForwardPass


class PagedLayer(CacheLayerMixin):
    """One layer's side of a paged cache."""

    is_sliding = False
    is_croppable = True

    def __init__(self, shape: KVShape, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: ForwardPass | None = None
        self._shape = shape
        self._layer = layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check that the model's keys and values are what its configuration promised."""
        expected = (self._shape.num_kv_heads, self._shape.head_dim)
        for name, states in (("keys", key_states), ("values", value_states)):
            got = (states.shape[1], states.shape[3])
            if got != expected or states.dtype != self._shape.dtype:
                raise UnsupportedModelError(
                    f"layer {self._layer} makes {name} of (heads, head_dim) {got}, {states.dtype};"
                    f" its configuration says {expected}, {self._shape.dtype}: models that expand"
                    " a latent cache or mix KV shapes are not supported"
                )
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **ignored: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens to the pool and leave the running pass in the layer's `kwargs`."""
        del args, ignored
        if self.running is None or kwargs is None:
            raise UnsupportedModelError(
                f"layer {self._layer} updates its cache outside of a runner's pass, or does not"
                " hand its keyword arguments on: this model's attention cannot be paged"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.running.append(self._layer, key_states, value_states)
        kwargs[PASS_KEY] = (self.running, self._layer)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes for a mask that is never built."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: the rows of a batch differ in length, and positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: no maximum."""
        return -1


class PagedCache(Cache):
    """A cache for the runner's own forward passes.

    Args:
        shape: the model's KV shape; one `PagedLayer` for each of its layers is made.
    """

    def __init__(self, shape: KVShape) -> None:
        self.paged = [PagedLayer(shape, layer) for layer in range(shape.num_layers)]
        super().__init__(layers=list(self.paged))

    def bind(self, running: ForwardPass | None) -> None:
        """Make a pass the one that `update` appends to; None when it is over."""
        for layer in self.paged:
            layer.running = running
