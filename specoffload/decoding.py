"""The loop: what happens in a round, and when a row has ended.

Knows token ids, lanes and clocks. Refuses to know where blocks lie.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from specoffload.config import SpecOffloadConfig
from specoffload.core.gamma import AutoGamma, FixedGamma
from specoffload.hf.requests import Request
from specoffload.metrics import Meter
from specoffload.speculation import Lane, draft_tokens, verify_tokens
from specoffload_fusion import Signal


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then each committed token."""

    def end(self) -> None:
        """Take note that the text is complete, or that generation failed."""


class Decoding:
    """Decodes one group of rows to their ends: draft, verify, accept, settle, round after round.

    Args:
        request: limits and ends.
        prompts: the rows of the group.
        lanes: the target's, then the draft's if there is one.
        config: how to draft and what to collect.
        first_row: what the group's first row is in the call.
        streamer: gets committed tokens.
        meter: counts.

    Attributes:
        signal: the target's attention mass in the last verify.
    """

    def __init__(
        self,
        request: Request,
        prompts: list[list[int]],
        lanes: list[Lane],
        config: SpecOffloadConfig,
        *,
        first_row: int,
        streamer: Streamer | None,
        meter: Meter,
    ) -> None:
        self.signal: Signal | None = None
        self._request = request
        self._config = config
        self._first_row = first_row
        self._target = lanes[0]
        self._draft = lanes[1] if len(lanes) > 1 else None
        self._streamer = streamer
        self._meter = meter
        self._texts = [list(prompt) for prompt in prompts]
        self._left = [request.max_new_tokens] * len(prompts)
        self._active = list(range(len(prompts)))
        gamma = self._config.num_draft_tokens if self._draft is not None else 0
        self._gamma = (
            AutoGamma(max_gamma=self._config.max_draft_tokens)
            if gamma == "auto"
            else FixedGamma(int(gamma))
        )

    def run(self) -> list[list[int]]:
        """Return the texts of the group, prompts included."""
        start = time.perf_counter()
        first = [
            int(self._target.prefill(row, text).argmax()) for row, text in enumerate(self._texts)
        ]
        self._target.pool.return_lent()
        for row, text in enumerate(self._texts):
            if self._draft is not None and len(text) > 1 and self._left[row] > 1:
                self._draft.prefill(row, text[:-1])
        for row, token in enumerate(first):
            self._meter.first_tokens += 1
            self._extend(row, [token])
        now = time.perf_counter()
        self._meter.prefill_s += now - start
        while self._active:
            self._round()
        self._meter.decode_s += time.perf_counter() - now
        return self._texts

    def _round(self) -> None:
        rows = self._active
        wanted = self._gamma.choose()
        gammas = [min(wanted, self._left[row] - 1) for row in rows]
        texts = [self._texts[row] for row in rows]
        running = self._target.pool.begin(
            rows,
            [gamma + 1 for gamma in gammas],
            max(gammas) + 1,
            with_signal=self._config.collect_signal,
        )
        start = time.perf_counter()
        try:
            drafted: list[list[int]] = [[] for _ in rows]
            if self._draft is not None:
                drafted = draft_tokens(self._draft, rows, texts, gammas)
            middle = time.perf_counter()
            emitted = verify_tokens(self._target, running, [text[-1] for text in texts], drafted)
        finally:
            running.cancel()
        end = time.perf_counter()
        if self._config.collect_signal:
            self._keep_signal(running.mass([len(tokens) for tokens in emitted]), rows, emitted)
        for row, tokens, gamma in zip(rows, emitted, gammas, strict=True):
            self._target.pool.settle(row, len(tokens))
            if self._draft is not None and gamma:
                # All but the last two tokens of a text stay in the draft's cache.
                settled = len(self._texts[row]) + len(tokens) - 2
                cached = int(self._draft.pool.ledger.committed[row])
                self._draft.pool.settle(row, settled - cached)
        # What lies behind a row's end was checked in vain: it counts for nothing.
        accepted = [
            min(len(tokens) - 1, self._extend(row, tokens))
            for row, tokens in zip(list(rows), emitted, strict=True)
        ]
        for lane in (self._target, self._draft):
            if lane is not None:
                lane.pool.end_round()
        self._gamma.observe(
            gamma=max(gammas),
            drafted=sum(gammas),
            accepted=sum(accepted),
            rejections=sum(a < g for a, g in zip(accepted, gammas, strict=True)),
            draft_s=middle - start,
            verify_s=end - middle,
        )
        self._meter.add_round(
            rows=len(rows),
            drafted=sum(gammas),
            accepted=sum(accepted),
            draft_s=middle - start,
            verify_s=end - middle,
        )

    def _keep_signal(
        self,
        mass_LRHN: npt.NDArray[np.float32],
        rows: list[int],
        emitted: list[list[int]],
    ) -> None:
        num_rows = np.array([len(tokens) for tokens in emitted])
        committed = self._target.pool.ledger.committed[rows]
        self.signal = Signal(
            round_index=self._meter.rounds,
            rows=np.array(rows) + self._first_row,
            mass=mass_LRHN.swapaxes(0, 1),
            num_tokens=committed + num_rows,
            num_rows=num_rows,
            block_size=self._config.block_size,
        )

    def _extend(self, row: int, tokens: list[int]) -> int:
        """Add tokens to a row's text, up to its end; forget the row's KV if it has ended.

        Returns:
            How many tokens were added.
        """
        kept = tokens[: self._left[row]]
        for index, token in enumerate(kept):
            if token in self._request.eos_token_ids:
                kept = kept[: index + 1]
                break
        self._texts[row] += kept
        self._left[row] -= len(kept)
        self._meter.new_tokens += len(kept)
        if self._streamer is not None:
            for token in kept:
                self._streamer.put(torch.tensor([token]))
        if not self._left[row] or kept[-1] in self._request.eos_token_ids:
            self._active = [other for other in self._active if other != row]
            for lane in (self._target, self._draft):
                if lane is not None:
                    lane.pool.release(row)
        return len(kept)
