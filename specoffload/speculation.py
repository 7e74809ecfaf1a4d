"""Draft, verify, accept: the loop's steps, for a batch of rows that advance at their own pace.

Knows token ids and forward passes. What is accepted here is exactly what plain greedy decoding of
the target would have produced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from specoffload.hf.attention import attention_configs, paged_attention_enabled
from specoffload.hf.cache import PagedCache
from specoffload.tiers.forward import ForwardPass
from specoffload.tiers.pool import BlockPool


class Lane:
    """A model and the pool that holds its KV.

    Args:
        model: draft or target.
        pool: its blocks.
        prefill_chunk: most prompt tokens in one forward pass.
    """

    def __init__(self, model: PreTrainedModel, pool: BlockPool, *, prefill_chunk: int) -> None:
        self.model = model
        self.pool = pool
        self._prefill_chunk = prefill_chunk
        self._cache = PagedCache(pool.shape)
        self._configs = attention_configs(model)

    def forward(self, running: ForwardPass, ids_BQ: torch.Tensor, num_logits: int) -> torch.Tensor:
        """Run a pass; return the logits of its last `num_logits` queries, `[B, num_logits, V]`."""
        self._cache.bind(running)
        try:
            with running, paged_attention_enabled(self._configs):
                out = self.model(
                    input_ids=ids_BQ.to(running.positions_BQ.device),
                    position_ids=running.positions_BQ,
                    cache=self._cache,
                    use_cache=True,
                    logits_to_keep=num_logits,
                )
        finally:
            self._cache.bind(None)
        logits: torch.Tensor = out.logits
        return logits

    def tokens_at_once(self, row: int) -> int:
        """Return how many tokens of a row one pass may take."""
        return self.pool.tokens_at_once(row, self._prefill_chunk)

    def fits(self, rows: Sequence[int], num_tokens: int, num_more: int) -> bool:
        """Say whether one pass may take `num_tokens` of each row, and later ones `num_more` more.

        All of them stay provisional until the last pass is done.
        """
        return num_tokens <= self._prefill_chunk and self.pool.fits(rows, num_tokens + num_more)

    def prefill(self, row: int, tokens: Sequence[int]) -> torch.Tensor:
        """Cache and commit tokens of a row, chunk by chunk; return the last one's logits, `[V]`.

        Precondition: at least one token.
        """
        size = self.tokens_at_once(row)
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            running = self.pool.begin([row], [len(chunk)], len(chunk), with_signal=False)
            logits = self.forward(running, torch.tensor([chunk]), 1)
            self.pool.settle(row, len(chunk))
            self.pool.end_round()
        return logits[0, -1]


def draft_tokens(
    lane: Lane, rows: Sequence[int], texts: Sequence[Sequence[int]], gammas: Sequence[int]
) -> list[list[int]]:
    """Let the draft continue each text by up to `gammas[i]` tokens, greedily.

    The draft's cache holds all but the last two tokens of a text as committed: feeding the last two
    again makes a fully accepted row no special case. What it writes here stays provisional.
    """
    steps = max(gammas)
    drafted: list[list[int]] = [[] for _ in rows]
    if not steps:
        return drafted
    committed = lane.pool.ledger.committed
    # Rounds without drafting leave the draft behind; what it missed goes into the first pass where
    # that keeps the batch rectangular and its blocks within the budget.
    missed = [
        len(text) - 2 - int(committed[row]) if gamma else 0
        for row, text, gamma in zip(rows, texts, gammas, strict=True)
    ]
    if any(count != missed[0] for count in missed) or not lane.fits(rows, missed[0] + 2, steps - 1):
        for row, text, count in zip(rows, texts, missed, strict=True):
            if count:
                lane.prefill(row, text[len(text) - 2 - count : len(text) - 2])
        missed = [0] * len(rows)
    feed = [list(text[len(text) - 2 - count :]) for text, count in zip(texts, missed, strict=True)]
    for step in range(steps):
        num_new = [len(f) if step < gamma else 0 for f, gamma in zip(feed, gammas, strict=True)]
        running = lane.pool.begin(rows, num_new, len(feed[0]), with_signal=False)
        logits = lane.forward(running, torch.tensor(feed), 1)
        best = logits[:, -1].argmax(-1).tolist()
        for tokens, token, gamma in zip(drafted, best, gammas, strict=True):
            if step < gamma:
                tokens.append(token)
        feed = [[token] for token in best]
    return drafted


def verify_tokens(
    lane: Lane, running: ForwardPass, last: Sequence[int], drafted: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Check drafted tokens in one pass of the target.

    Args:
        lane: the target's.
        running: begun for `len(drafted[i]) + 1` new tokens of each row.
        last: the newest token of each row, not yet in the cache.
        drafted: what the draft proposed for each row.

    Returns:
        For each row the accepted tokens, then the target's own next one.
    """
    num_queries = max(len(tokens) for tokens in drafted) + 1
    ids_BQ = torch.zeros(len(last), num_queries, dtype=torch.long)
    for index, (token, tokens) in enumerate(zip(last, drafted, strict=True)):
        ids_BQ[index, : len(tokens) + 1] = torch.tensor([token, *tokens])
    logits = lane.forward(running, ids_BQ, num_queries)
    accepted = []
    for tokens, best in zip(drafted, logits.argmax(-1).tolist(), strict=True):
        count = 0
        while count < len(tokens) and tokens[count] == best[count]:
            count += 1
        accepted.append([*tokens[:count], best[count]])
    return accepted
