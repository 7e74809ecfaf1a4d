"""The attention and mask functions registered with transformers under the name "specoffload".

Every decoder layer calls `cache.update(k, v, layer_idx, kwargs=kwargs)` and hands the same `kwargs`
to its attention function: our cache leaves the running pass there, and this file finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from specoffload.tiers.forward import ForwardPass

NAME: Final = "specoffload"
PASS_KEY: Final = "specoffload_pass"
"""Where `PagedCache.update` leaves `(pass, layer)` in the keyword arguments of a layer."""


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to the paged pool, in the form that transformers calls.

    Args:
        module: the attention layer.
        query: `[B, Hq, Q, D]`.
        key: new keys only, already in the pool.
        value: new values only, already in the pool.
        attention_mask: must be None: rows carry no padding in the pool.
        dropout: must be 0.
        scaling: factor on the logits; `D ** -0.5` if None.
        sliding_window: tokens that a query sees, itself included.
        softcap: bound of the logits (Gemma 2).
        s_aux: one sink logit for each query head (GPT-OSS), `[Hq]`.
        kwargs: holds the pass under `PASS_KEY`.

    Returns:
        `[B, Q, Hq, D]`, and None for the weights, which are never built.
    """
    del key, value
    handle: tuple[ForwardPass, int] | None = kwargs.get(PASS_KEY)
    if handle is None or attention_mask is not None or dropout:
        raise RuntimeError(
            f"{type(module).__name__} runs attention {NAME!r} outside of a runner: this"
            " implementation reads the runner's own cache, without mask or dropout"
        )
    forward_pass, layer = handle
    out = forward_pass.attend(
        layer,
        query,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return out, None


def no_mask(
    *args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """Return the padding mask as it is: visibility follows from positions, so no mask is built."""
    del args, kwargs
    return attention_mask


AttentionInterface.register(NAME, paged_attention_forward)
AttentionMaskInterface.register(NAME, no_mask)


def attention_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configuration objects that a model's layers read, each once."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def paged_attention_enabled(configs: list[PreTrainedConfig]) -> Iterator[None]:
    """Let a model's layers use our attention for the time of one forward pass.

    Args:
        configs: the model's `attention_configs`.
    """
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
