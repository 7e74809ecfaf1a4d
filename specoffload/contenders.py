"""Ways to answer one request, each timed from outside in the same way.

Knows how to call and time transformers' own generation and ours. Refuses to know how any of them
works: what cannot be seen from outside comes from the runner's own report.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self, cast

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from specoffload.config import SpecOffloadConfig
from specoffload.console import Stopwatch
from specoffload.pairs import Pair
from specoffload.report import RunReport
from specoffload.runner import SpecOffloadRunner


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every contender is asked for: greedy text after a prompt.

    Attributes:
        pair: the two models; only the target's text counts.
        ids: `[1, n]` the prompt.
        new_tokens: the most tokens to write; an end token may make it fewer.
    """

    pair: Pair
    ids: torch.Tensor
    new_tokens: int

    @property
    def context(self) -> int:
        """Tokens of the prompt."""
        return int(self.ids.shape[1])


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed answer. Times are seconds, sizes bytes; None where nothing was measured.

    Attributes:
        tokens: the new tokens.
        prefill_s: from the call to the first arrival of tokens.
        tokens_per_s: tokens after the first arrival, per second from then until the call returned.
        tokens_per_verify: tokens per forward pass of the target.
        acceptance: accepted / drafted.
        peak_device_bytes: bytes of KV on the device; for transformers, of its caches at the end.
        report: the runner's own account, where there is one.
    """

    tokens: tuple[int, ...]
    prefill_s: float
    tokens_per_s: float | None
    tokens_per_verify: float | None = None
    acceptance: float | None = None
    peak_device_bytes: int = 0
    report: RunReport | None = None


class Contender(Protocol):
    """A way to answer a request."""

    @property
    def name(self) -> str:
        """A short name, unique in one bench."""

    def run(self, request: Request, sinks: Sequence[BaseStreamer] = ()) -> Sample:
        """Answer `request` once, showing tokens to `sinks` as they come."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The target alone, through transformers.

    Attributes:
        cache_implementation: which cache of transformers' own; None for its default. "offloaded"
            keeps one layer on the GPU at a time, and needs one.
    """

    name: str = "hf"
    cache_implementation: Literal["offloaded"] | None = None

    def run(self, request: Request, sinks: Sequence[BaseStreamer] = ()) -> Sample:
        """Answer `request` once."""
        target = request.pair.target
        with _Forwards(target) as passes:
            sample = _timed(
                request,
                cast(Any, target).generate,
                sinks,
                do_sample=False,
                cache_implementation=self.cache_implementation,
            )
        return replace(
            sample,
            tokens_per_verify=len(sample.tokens) / passes.num_passes,
            peak_device_bytes=passes.cache_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Assisted:
    """The same pair through transformers' assisted generation; its passes are counted from outside.

    Attributes:
        num_draft_tokens: gamma for it, too; "auto" leaves it its own rule (drafting stops where the
            draft is unsure).
    """

    num_draft_tokens: int | Literal["auto"] = "auto"
    name: str = "hf-assisted"

    def run(self, request: Request, sinks: Sequence[BaseStreamer] = ()) -> Sample:
        """Answer `request` once."""
        draft, target = request.pair.draft, request.pair.target
        kept = draft.generation_config
        # A copy: assisted generation adapts what it finds there, from one call to the next.
        draft.generation_config = copy.deepcopy(kept)
        if self.num_draft_tokens != "auto":
            draft.generation_config.num_assistant_tokens = max(1, self.num_draft_tokens)
            draft.generation_config.assistant_confidence_threshold = 0.0
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # it warns of the way in which it calls itself
        try:
            with _Forwards(target) as verifies, _Forwards(draft) as drafts:
                sample = _timed(
                    request,
                    cast(Any, target).generate,
                    sinks,
                    do_sample=False,
                    assistant_model=draft,
                )
        finally:
            draft.generation_config = kept
            logging.set_verbosity(verbosity)
        # Each pass reads one settled token and a draft, the first the whole prompt and a draft.
        drafted = verifies.num_rows - request.context - (verifies.num_passes - 1)
        accepted = len(sample.tokens) - verifies.num_passes
        return replace(
            sample,
            tokens_per_verify=len(sample.tokens) / verifies.num_passes,
            acceptance=accepted / drafted if drafted else None,
            peak_device_bytes=verifies.cache_bytes + drafts.cache_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """Ours, under a configuration."""

    name: str
    config: SpecOffloadConfig

    def run(self, request: Request, sinks: Sequence[BaseStreamer] = ()) -> Sample:
        """Answer `request` once, with a runner of its own.

        Raises:
            BudgetError: the configuration's device budget is below one working set.
        """
        pair = request.pair
        with SpecOffloadRunner(pair.draft, pair.target, self.config) as runner:
            sample = _timed(request, runner.generate, sinks)
            report = runner.report()
        return replace(
            sample,
            tokens_per_verify=report.tokens_per_verify,
            acceptance=report.acceptance,
            peak_device_bytes=report.peak_device_bytes,
            report=report,
        )


def _timed(
    request: Request,
    generate: Callable[..., torch.Tensor],
    sinks: Sequence[BaseStreamer],
    **options: object,
) -> Sample:
    """Call `generate` and time it: everybody's clock is this one."""
    watch = Stopwatch(sinks)
    start_s = time.perf_counter()
    out = generate(
        request.ids,
        attention_mask=torch.ones_like(request.ids),
        max_new_tokens=request.new_tokens,
        streamer=watch,
        **options,
    )
    end_s = time.perf_counter()
    assert watch.first_s is not None, "generate returned without a token"
    num_later = watch.num_tokens - watch.num_first
    return Sample(
        tokens=tuple(out[0, request.context :].tolist()),
        prefill_s=watch.first_s - start_s,
        tokens_per_s=num_later / (end_s - watch.first_s) if num_later else None,
    )


class _Forwards:
    """Counts a model's forward passes, the tokens they read, and its cache's last bytes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.num_passes = 0
        self.num_rows = 0
        self.cache_bytes = 0
        self._model = model
        self._cache: Any = None

    def __enter__(self) -> Self:
        self._hook = self._model.register_forward_hook(self._seen, with_kwargs=True)
        return self

    def __exit__(self, *_error: object) -> None:
        self._hook.remove()
        layers = [] if self._cache is None else self._cache.layers
        self.cache_bytes = sum(
            tensor.nbytes
            for layer in layers
            for tensor in (layer.keys, layer.values)
            if tensor.device == self._model.device
        )
        self._cache = None

    def _seen(
        self, _model: torch.nn.Module, _args: object, kwargs: dict[str, Any], output: Any
    ) -> None:
        self.num_passes += 1
        self.num_rows += kwargs["input_ids"].shape[1]
        self._cache = output.cache
