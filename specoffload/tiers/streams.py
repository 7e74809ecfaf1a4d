"""Queues of work on a device: compute, copies up, copies down. The seam below the stream engine.

Knows order and bytes. Refuses to know blocks. A device does what one stream was given in that
order, and nothing else is ordered unless a wait says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from enum import Enum
from typing import Generic, TypeVar

import torch

from specoffload.tiers.access import COMPUTE, active_log
from specoffload.tiers.ram import span_of

EventT = TypeVar("EventT")


class StreamName(Enum):
    """The streams of a device; the value is the actor that they are in a record of accesses."""

    COMPUTE = COMPUTE
    """Attends and appends, for draft and target alike: whatever torch runs."""
    UP = "stream up"
    """Host to device."""
    DOWN = "stream down"
    """Device to host."""


class Mark(Generic[EventT]):
    """A point in a stream: reached when the stream has done all that it was given before.

    Its event is used again when nobody holds the mark any more: a wait looks at an event once, when
    it is made, so nothing can depend on it then.
    """

    __slots__ = ("_spare", "event")

    def __init__(self, event: EventT, spare: deque[EventT]) -> None:
        self.event = event
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self.event)


class Streams(ABC, Generic[EventT]):
    """Three streams, marks in them, and waits between them. May be called from any thread."""

    def __init__(self) -> None:
        self._log = active_log()
        self._spare: deque[EventT] = deque()
        self._num_events = 0

    @property
    def num_events(self) -> int:
        """Events ever made."""
        return self._num_events

    def mark(self, stream: StreamName) -> Mark[EventT]:
        """Return the point that a stream is at now."""
        try:
            event = self._spare.popleft()
        except IndexError:
            event = self._new_event()
            self._num_events += 1
        self._record(stream, event)
        mark = Mark(event, self._spare)
        if self._log is not None:
            self._log.release(mark, stream.value)
        return mark

    def wait(self, stream: StreamName, mark: Mark[EventT]) -> None:
        """Let a stream start what it is given from now on only after a mark. Returns at once."""
        self._wait(stream, mark.event)
        if self._log is not None:
            self._log.acquire(mark, stream.value)

    def copy(self, stream: StreamName, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give a stream a copy of bytes. Returns at once; both stay untouched until it is done.

        Args:
            stream: UP or DOWN.
            target: where to, contiguous.
            source: where from, contiguous, as many bytes.
        """
        if self._log is not None:
            self._log.launch(stream.value)
            self._log.read(span_of(source), stream.value)
            self._log.write(span_of(target), stream.value)
        with torch.inference_mode():
            self._copy(stream, target, source)

    def synchronize(self, mark: Mark[EventT]) -> None:
        """Block the calling thread until a mark is reached."""
        self._synchronize(mark.event)
        if self._log is not None:
            self._log.acquire(mark)

    @abstractmethod
    def is_reached(self, mark: Mark[EventT]) -> bool:
        """Whether a mark is reached."""

    @abstractmethod
    def seconds_between(self, first: Mark[EventT], second: Mark[EventT]) -> float:
        """Return the time from one reached mark to another."""

    @abstractmethod
    def pin(self, memory: torch.Tensor) -> None:
        """Make host memory known to the device, so that copies need no help of the processor."""

    @abstractmethod
    def unpin(self, memory: torch.Tensor) -> None:
        """Undo `pin`. Precondition: no copy of the memory is under way."""

    def close(self) -> None:
        """End what the streams need. Precondition: every copy is done. Idempotent."""

    @abstractmethod
    def _new_event(self) -> EventT: ...

    @abstractmethod
    def _record(self, stream: StreamName, event: EventT) -> None: ...

    @abstractmethod
    def _wait(self, stream: StreamName, event: EventT) -> None: ...

    @abstractmethod
    def _copy(self, stream: StreamName, target: torch.Tensor, source: torch.Tensor) -> None: ...

    @abstractmethod
    def _synchronize(self, event: EventT) -> None: ...
