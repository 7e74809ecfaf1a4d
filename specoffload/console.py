"""What a person at a terminal sees while a model writes: the text, and how far it is.

Knows streams, terminals and tokens. Refuses to know who generates them, or what for.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.generation.streamers import BaseStreamer

from specoffload import recall_task


class Progress:
    """One line on a terminal that is rewritten in place; elsewhere, only whole lines.

    Args:
        stream: where to write, stderr by default: stdout belongs to the text.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._width = 0

    def update(self, text: str) -> None:
        """Show `text` in place of what this line showed before; nothing where that cannot be."""
        if not self._live:
            return
        text = text[:100]
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Leave the line empty for other output."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def line(self, text: str) -> None:
        """Write `text` as a line that stays."""
        self.clear()
        self._stream.write(text + "\n")
        self._stream.flush()


@contextlib.contextmanager
def watch_reading(model: PreTrainedModel, num_tokens: int, progress: Progress) -> Iterator[None]:
    """Show on `progress` how much of a prompt of `num_tokens` the model has read."""
    seen = 0

    def count(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal seen
        if seen < num_tokens:
            seen += inputs[0].shape[-1]
            progress.update(f"reading the prompt: {min(seen, num_tokens)} of {num_tokens} tokens")

    hook = model.get_input_embeddings().register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


class Stopwatch(BaseStreamer):
    """Notes when new tokens arrive, and passes them on.

    Args:
        sinks: streamers that see everything after it was noted.

    Attributes:
        num_tokens: new tokens so far.
        num_first: how many came with the first arrival: all that the prefill gave.
        first_s: `time.perf_counter()` at that arrival, None before it.
    """

    def __init__(self, sinks: Sequence[BaseStreamer] = ()) -> None:
        self.num_tokens = 0
        self.num_first = 0
        self.first_s: float | None = None
        self._sinks = sinks
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt at the first call, new tokens at each later one."""
        if self._prompt_seen:
            if self.first_s is None:
                self.first_s = time.perf_counter()
                self.num_first = value.numel()
            self.num_tokens += value.numel()
        self._prompt_seen = True
        for sink in self._sinks:
            sink.put(value)

    def end(self) -> None:
        """Pass the end on."""
        for sink in self._sinks:
            sink.end()


class ProgressStreamer(BaseStreamer):
    """Shows on a progress line how many tokens have been written, and how fast.

    Args:
        progress: the line.
        label: what the line begins with.
        total: the most tokens that may come.
    """

    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._label = label
        self._total = total
        self._num_tokens = 0
        self._first_s: float | None = None
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Count new tokens and show them."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        now = time.perf_counter()
        if self._first_s is None:
            self._first_s = now
        self._num_tokens += value.numel()
        elapsed = now - self._first_s
        rate = f", {(self._num_tokens - 1) / elapsed:.1f} tokens/s" if elapsed > 0 else ""
        self._progress.update(f"{self._label}: {self._num_tokens} of {self._total} tokens{rate}")

    def end(self) -> None:
        """Leave the line to others."""
        self._progress.clear()


class RecallPrinter(BaseStreamer):
    """Prints the tiny pair's tokens as the words of its task: `k7?` asks, `v3` answers."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Print new tokens."""
        if self._prompt_seen:
            self._progress.clear()
            sys.stdout.write("".join(f"{_word(token)} " for token in value.flatten().tolist()))
            sys.stdout.flush()
        self._prompt_seen = True

    def end(self) -> None:
        """End the line."""
        sys.stdout.write("\n")


class TextPrinter(TextStreamer):
    """Prints new text; clears a progress line before the first of it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._progress = progress

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a piece of text that later tokens cannot change."""
        if text or stream_end:
            self._progress.clear()
            super().on_finalized_text(text, stream_end=stream_end)


def text_printer(tokenizer: PreTrainedTokenizerBase | None, progress: Progress) -> BaseStreamer:
    """Return what prints new tokens; without a tokenizer, as words of the recall task."""
    if tokenizer is None:
        return RecallPrinter(progress)
    return TextPrinter(tokenizer, progress)


def _word(token: int) -> str:
    if token < recall_task.FIRST_QUERY:
        key, value = divmod(token, recall_task.NUM_VALUES)
        return f"k{key}=v{value}"
    if token < recall_task.FIRST_VALUE:
        return f"k{token - recall_task.FIRST_QUERY}?"
    if token < recall_task.FIRST_FILLER:
        return f"v{token - recall_task.FIRST_VALUE}"
    return "."
