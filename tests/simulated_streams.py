"""Streams without a device: each does what it was given on a thread of its own, at random speed.

A wait between streams is the only thing that orders them, as on a device; so a copy that nothing
holds back really runs too early or too late, and the wrong bytes show.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable

import torch

from specoffload.tiers.streams import Mark, StreamName, Streams


class Event:
    """What a stream sets when it gets there. Recorded again, it leaves earlier waits alone."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.reached_at = 0.0


class SimulatedStreams(Streams[Event]):
    """Three streams on threads.

    Args:
        delay_s: longest time that a copy takes longer than it must.
        seed: of the delays.
        inline: compute is the calling thread, as when torch runs on the CPU: a wait of it blocks.
    """

    def __init__(self, *, delay_s: float = 0.002, seed: int = 0, inline: bool = True) -> None:
        super().__init__()
        self.num_copies = 0
        self.pinned: set[int] = set()
        self._delay_s = delay_s
        self._random = random.Random(seed)
        self._inline = inline
        self._work: dict[StreamName, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        for name in StreamName:
            if name is StreamName.COMPUTE and inline:
                continue
            self._work[name] = queue.SimpleQueue()
            thread = threading.Thread(target=self._drain, args=(self._work[name],), daemon=True)
            thread.start()
            self._threads.append(thread)

    def compute(self, work: Callable[[], None]) -> None:
        """Give the compute stream something to do."""
        self._give(StreamName.COMPUTE, work)

    def is_reached(self, mark: Mark[Event]) -> bool:
        return mark.event.reached.is_set()

    def seconds_between(self, first: Mark[Event], second: Mark[Event]) -> float:
        return second.event.reached_at - first.event.reached_at

    def pin(self, memory: torch.Tensor) -> None:
        if memory.numel():
            assert memory.data_ptr() not in self.pinned, "pinned twice"
            self.pinned.add(memory.data_ptr())

    def unpin(self, memory: torch.Tensor) -> None:
        if memory.numel():
            self.pinned.remove(memory.data_ptr())

    def close(self) -> None:
        for work in self._work.values():
            work.put(None)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _give(self, stream: StreamName, work: Callable[[], None]) -> None:
        if stream is StreamName.COMPUTE and self._inline:
            work()
        else:
            self._work[stream].put(work)

    def _drain(self, work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (each := work.get()) is not None:
            each()

    def _new_event(self) -> Event:
        return Event()

    def _record(self, stream: StreamName, event: Event) -> None:
        reached = event.reached = threading.Event()

        def reach() -> None:
            event.reached_at = time.perf_counter()
            reached.set()

        self._give(stream, reach)

    def _wait(self, stream: StreamName, event: Event) -> None:
        reached = event.reached

        def wait() -> None:
            assert reached.wait(30), "a stream waits for ever"

        self._give(stream, wait)

    def _copy(self, stream: StreamName, target: torch.Tensor, source: torch.Tensor) -> None:
        assert stream is not StreamName.COMPUTE
        assert target.shape == source.shape
        self.num_copies += 1
        delay = self._random.uniform(0, self._delay_s)
        to, from_ = target.numpy(), source.numpy()

        def copy() -> None:
            time.sleep(delay)
            to[...] = from_

        self._give(stream, copy)

    def _synchronize(self, event: Event) -> None:
        assert event.reached.wait(30)
