"""The task of the embedded tiny pair: a table far back, and a stream whose focus must jump.

Knows the token ids, the layout and every right answer, so that training, tests and ``doctor`` agree
on them. Refuses to know models: numpy only, no torch.

A prompt is BOS, a table with one entry per slot (the entry at a random place in its slot, random
filler around it), then a stream ``k v k+1 v' k+2 v'' ...`` of query and value tokens. An entry is
**one** token, ``E(key, value) = key * 16 + value``, so a value can only be predicted by attending
to the one entry of its key; the next key is the successor, so that entry changes at every query.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specoffload.errors import SpecOffloadError

NUM_KEYS = 64
NUM_VALUES = 16
FIRST_QUERY = NUM_KEYS * NUM_VALUES
FIRST_VALUE = FIRST_QUERY + NUM_KEYS
FIRST_FILLER = FIRST_VALUE + NUM_VALUES
NUM_FILLERS = 64
BOS = FIRST_FILLER + NUM_FILLERS
VOCAB_SIZE = 1184

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class RecallPrompt:
    """One sequence of the recall task with its answers.

    Attributes:
        ids: `[num_tokens]` the whole sequence: BOS, table, stream.
        prompt_length: tokens up to and including the first query; ``ids[:prompt_length]`` is what a
            model is given to generate the rest.
        query_positions: `[num_queries]` where the query tokens are; what a model predicts *at* such
            a position must be the value, which stands one position later.
        values: `[num_queries]` the right token id after each query.
        entry_positions: `[num_queries]` the position of the one entry that holds each answer.
    """

    ids: Ints
    prompt_length: int
    query_positions: Ints
    values: Ints
    entry_positions: Ints


def entry_token(key: int, value: int) -> int:
    """The token id of the table entry that maps `key` in `[0, 64)` to `value` in `[0, 16)`."""
    return key * NUM_VALUES + value


def recall_prompt(
    num_entries: int = 64, slot: int = 8, seed: int = 0, *, num_queries: int = 32
) -> RecallPrompt:
    """Draw one sequence of ``1 + num_entries * slot + 2 * num_queries`` tokens.

    With fewer than 64 entries the table holds a run of consecutive keys, and the stream goes from
    the last of them back to the first.

    Args:
        num_entries: entries in the table, 1 to 64.
        slot: tokens per entry, the entry included.
        seed: the same seed gives the same sequence.
        num_queries: (query, value) pairs in the stream.

    Raises:
        SpecOffloadError: a number is out of its range.
    """
    if not 1 <= num_entries <= NUM_KEYS:
        raise SpecOffloadError(f"num_entries must be in [1, {NUM_KEYS}], got {num_entries}")
    if slot < 1 or num_queries < 1:
        raise SpecOffloadError(
            f"slot and num_queries must be at least 1, got {slot} and {num_queries}"
        )
    rng = np.random.default_rng(seed)
    keys = (rng.integers(NUM_KEYS) + np.arange(num_entries)) % NUM_KEYS
    values = rng.integers(NUM_VALUES, size=num_entries)

    place_of_entry = rng.permutation(num_entries)  # keys[i] stands in slot place_of_entry[i]
    offsets = rng.integers(slot, size=num_entries)
    table = rng.integers(FIRST_FILLER, FIRST_FILLER + NUM_FILLERS, size=num_entries * slot)
    positions = place_of_entry * slot + offsets
    table[positions] = keys * NUM_VALUES + values

    asked = (rng.integers(num_entries) + np.arange(num_queries)) % num_entries
    stream = np.empty(2 * num_queries, dtype=np.int64)
    stream[0::2] = FIRST_QUERY + keys[asked]
    stream[1::2] = FIRST_VALUE + values[asked]
    ids = np.concatenate([np.array([BOS]), table, stream]).astype(np.int64)
    return RecallPrompt(
        ids=ids,
        prompt_length=1 + table.size + 1,
        query_positions=(1 + table.size + 2 * np.arange(num_queries)).astype(np.int64),
        values=stream[1::2].copy(),
        entry_positions=(1 + positions[asked]).astype(np.int64),
    )
