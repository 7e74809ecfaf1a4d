"""Reads a `generate` call: the rows without their padding, the limits, and what cannot be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from specoffload.errors import SpecOffloadError

_NO_EFFECT_ON_GREEDY = frozenset(
    {
        # ids and limits, read below
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_length",
        "max_new_tokens",
        "decoder_start_token_id",
        # sampling and beams, which have no effect without `do_sample` or `num_beams`
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "early_stopping",
        "length_penalty",
        # the cache and assisted generation of transformers itself
        "use_cache",
        "cache_implementation",
        "cache_config",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "is_assistant",
        # bookkeeping
        "transformers_version",
        "_from_model_config",
        "compile_config",
        "disable_compile",
    }
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One `generate` call.

    Attributes:
        prompts: the ids of each row, padding removed.
        max_new_tokens: most tokens to add to a row.
        eos_token_ids: ids that end a row.
        pad_token_id: fills rows that ended before the longest.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    pad_token_id: int


def read_request(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    max_new_tokens: int | None,
    max_length: int | None,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
) -> Request:
    """Check the arguments of `generate`; what is not given comes from the target's configuration.

    Raises:
        SpecOffloadError: an argument is malformed, or the target's `generation_config` asks for
            something that is not supported.
    """
    generation = target.generation_config or GenerationConfig()
    _refuse_unsupported(generation)
    _check_ids(target, input_ids)
    eos: Any = eos_token_id if eos_token_id is not None else generation.eos_token_id
    if isinstance(eos, torch.Tensor):
        eos = eos.tolist()
    eos_ids = _ids(eos)
    pad: int | None = pad_token_id if pad_token_id is not None else generation.pad_token_id
    if attention_mask is None and pad is not None and pad not in eos_ids:
        # As transformers does: padding can be told from text by its id.
        attention_mask = input_ids != pad
        if bool(attention_mask.all()):
            attention_mask = None
    prompts = _strip_padding(input_ids, attention_mask)
    if pad is None:
        pad = eos_ids[0] if eos_ids else 0
    return Request(
        prompts=prompts,
        max_new_tokens=_limit(generation, input_ids.shape[1], max_new_tokens, max_length),
        eos_token_ids=frozenset(eos_ids),
        pad_token_id=pad,
    )


def _refuse_unsupported(generation: GenerationConfig) -> None:
    if generation.do_sample:
        raise SpecOffloadError(
            "the target's generation_config has do_sample=True, and only greedy decoding is"
            " supported: set target.generation_config.do_sample = False"
        )
    for name, value in generation.to_diff_dict().items():
        if name not in _NO_EFFECT_ON_GREEDY and value not in (None, False):
            raise SpecOffloadError(
                f"the target's generation_config has {name}={value!r}, which is not supported and"
                f" will not be ignored: set target.generation_config.{name} = None"
            )


def _ids(eos: object) -> list[int]:
    """Read what transformers takes as `eos_token_id`."""
    listed = [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [eos]
    ids = [token for token in listed if isinstance(token, int)]
    if len(ids) < len(listed):
        raise SpecOffloadError(f"eos_token_id={eos!r} is not a token id (int), nor a list of them")
    return ids


def _check_ids(target: PreTrainedModel, input_ids: torch.Tensor) -> None:
    if not isinstance(input_ids, torch.Tensor):
        raise SpecOffloadError(
            f"input_ids is a {type(input_ids).__name__}: give a tensor [rows, tokens] of token ids"
        )
    if input_ids.dtype.is_floating_point or input_ids.dtype in (torch.bool, torch.complex64):
        raise SpecOffloadError(f"input_ids is {input_ids.dtype}: token ids are integers")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise SpecOffloadError(
            f"input_ids has shape {tuple(input_ids.shape)}: at least one row and one token"
            " [rows, tokens] are needed"
        )
    size = target.config.get_text_config(decoder=True).vocab_size
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= size:
        wrong = low if low < 0 else high
        raise SpecOffloadError(
            f"input_ids has the id {wrong}, and the vocabulary has ids 0 to {size - 1}"
        )


def _strip_padding(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    rows: list[list[int]] = input_ids.tolist()
    if mask is None:
        return rows
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise SpecOffloadError(
            f"attention_mask is {shape}: it must have the shape {tuple(input_ids.shape)} of"
            " input_ids"
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise SpecOffloadError("attention_mask has values other than 0 and 1: 0 hides a token")
    stripped = []
    for index, (row, keep) in enumerate(zip(rows, (mask != 0).tolist(), strict=True)):
        length = sum(keep)
        if not length:
            raise SpecOffloadError(f"attention_mask hides every token of row {index}")
        if not all(keep[-length:]):
            raise SpecOffloadError(
                f"attention_mask hides tokens of row {index} behind its first one: pad on the left"
                " (tokenizer.padding_side = 'left')"
            )
        stripped.append(row[-length:])
    return stripped


def _limit(
    generation: GenerationConfig, width: int, max_new_tokens: int | None, max_length: int | None
) -> int:
    if max_new_tokens is None and max_length is None:
        max_new_tokens, max_length = generation.max_new_tokens, generation.max_length
    if max_new_tokens is None:
        if max_length is None:
            raise SpecOffloadError(
                "neither max_new_tokens nor max_length is given, nor set in the target's"
                " generation_config: pass max_new_tokens"
            )
        if not isinstance(max_length, int) or max_length <= width:
            raise SpecOffloadError(
                f"max_length={max_length} leaves no room behind a prompt of {width} tokens: raise"
                " it or pass max_new_tokens"
            )
        return max_length - width
    if (
        not isinstance(max_new_tokens, int)
        or isinstance(max_new_tokens, bool)
        or max_new_tokens < 1
    ):
        raise SpecOffloadError(f"max_new_tokens={max_new_tokens!r} must be an int of at least 1")
    return max_new_tokens
