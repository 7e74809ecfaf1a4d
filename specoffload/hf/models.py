"""What must be true of a model, and of a pair, before anything is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from specoffload.errors import SpecOffloadError, UnsupportedModelError
from specoffload.tiers.device import KVShape

_PAGED_TYPES = {"full_attention", "sliding_attention"}


def kv_shape(model: PreTrainedModel, block_size: int, *, role: str) -> KVShape:
    """Return the shape of a model's KV blocks, from its configuration.

    Args:
        model: a causal language model.
        block_size: tokens of a block.
        role: "target" or "draft", for messages.

    Raises:
        UnsupportedModelError: the model is no decoder-only language model, or keeps state that is
            not keys and values of full or sliding attention.
    """
    name = f"{role} {type(model).__name__}"
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{name} is not a transformers model")
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder: only decoder-only models work")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{name} has no language-model head: load it with AutoModelForCausalLM"
        )
    config = model.config.get_text_config(decoder=True)
    try:
        layer_types, layer_kwargs = get_layer_types_and_kwargs(config)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"{name} does not say what its layers cache: {error}"
        ) from error
    strange = sorted(set(layer_types) - _PAGED_TYPES)
    if strange or getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(strange) or 'recurrent'}, whose state cannot be"
            " rolled back by the block: only full and sliding attention are supported"
        )
    if not model._supports_attention_backend and not model._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} does not let its attention implementation be chosen")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(f"{name} caches a latent (MLA), which has no block layout yet")
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return KVShape(
        num_layers=len(layer_types),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=_compute_dtype(model),
        windows=tuple(kwargs.get("sliding_window") for kwargs in layer_kwargs),
    )


def check_pair(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Check that a draft's tokens are the target's.

    Raises:
        UnsupportedModelError: the vocabularies differ in size.
    """
    draft_size, target_size = _vocab_size(draft.config), _vocab_size(target.config)
    if draft_size != target_size:
        raise UnsupportedModelError(
            f"the draft's vocabulary has {draft_size} entries and the target's {target_size}: draft"
            " and target must share one tokenizer"
        )


def common_device(models: Sequence[PreTrainedModel]) -> torch.device:
    """Return the device that all weights of some models lie on.

    Raises:
        UnsupportedModelError: they lie on several, or on one that blocks cannot be moved to.
    """
    devices = {parameter.device for model in models for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(
            f"the weights of the pair lie on {names}: load draft and target on one device"
        )
    (device,) = devices
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedModelError(
            f"the pair lies on {device}, and blocks can be moved to the CPU's memory and to CUDA"
            " devices only: load the pair on one of those"
        )
    return device


def check_length(model: PreTrainedModel, num_tokens: int, *, role: str) -> None:
    """Check that a sequence fits a model's positions.

    Raises:
        SpecOffloadError: it does not.
    """
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and num_tokens > limit:
        raise SpecOffloadError(
            f"prompt and new tokens make {num_tokens} positions, and the {role}"
            f" {type(model).__name__} has {limit}: shorten the prompt or lower max_new_tokens"
        )


def _vocab_size(config: PreTrainedConfig) -> int:
    return int(config.get_text_config(decoder=True).vocab_size)


def _compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the type of a model's activations, and so of its keys and values."""
    embeddings: Any = model.get_input_embeddings()
    dtype: torch.dtype = embeddings.weight.dtype
    return dtype
