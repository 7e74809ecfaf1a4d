"""Who reads and writes which memory, and what orders them: a record for tests to judge.

Every wait of the tiers is named here by the read or write that it protects. Recording is off unless
a test turns it on, and then costs a lock and a tuple an access; judging the record is for the test.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

COMPUTE: Final = "compute"
"""The actor that attends and appends: the calling thread, or the compute stream it launches on."""

HOST: Final = "host"
"""The thread that launches, where compute is a stream."""

MEMORY: Final = "memory"
"""The space of addresses; a spill file is a space of its own."""


class Guard(Enum):
    """What a wait protects. The value says it in a sentence."""

    STORE_AFTER_WRITE = "a store reads a slot only after the pass that wrote it"
    LOAD_AFTER_READ = "a load writes a slot only after the last pass or store that read it"
    READ_AFTER_LOAD = "a pass reads a staging slot only after the load that filled it"
    READ_AFTER_JOIN = "a pass reads a slot only after the promotion that it joined"
    READ_AFTER_PROMOTION = "a block counts as resident only after the load that brought it"
    REUSE_AFTER_STORE = "a slot is reused, and a home is read, only after the store between them"
    REUSE_AFTER_CANCEL = "the slots of a load that was given up are reused only after it is over"
    FILL_AFTER_COPY = "the disk fills a pinned buffer again only after the copy out of it"
    WRITE_AFTER_COPY = "the disk is written from a pinned buffer only after the copy into it"
    FREE_AFTER_MOVES = "arenas and homes are given back only after every move is over"


@dataclass(frozen=True, kw_only=True)
class Span:
    """Pieces of one size in one space.

    Attributes:
        space: MEMORY, or the name of a spill file.
        starts: first byte of each piece, `[n]`.
        size: bytes of each piece.
    """

    space: str
    starts: npt.NDArray[np.int64]
    size: int


@dataclass(frozen=True, kw_only=True)
class Access:
    """An actor reads or writes a span."""

    actor: Hashable
    span: Span
    is_write: bool


@dataclass(frozen=True, kw_only=True)
class Release:
    """All that an actor did so far happens before what follows an `Acquire` of the token."""

    actor: Hashable
    token: Hashable


@dataclass(frozen=True, kw_only=True)
class Acquire:
    """An actor waited for a token."""

    actor: Hashable
    token: Hashable


class AccessLog:
    """What every actor did, each actor's events in its own order, releases before acquires."""

    def __init__(self) -> None:
        self.events: list[Access | Release | Acquire] = []
        self._numbers = itertools.count()
        self._local = threading.local()
        self._default = COMPUTE

    def has_streams(self) -> None:
        """Tell compute from the thread that launches it: from now on that is the actor HOST."""
        self._default = HOST

    @property
    def actor(self) -> Hashable:
        """Who the calling thread is."""
        return getattr(self._local, "actor", self._default)

    def launch(self, actor: Hashable) -> None:
        """Record that the calling thread launches work of a stream, after all that it did."""
        if actor != self.actor:
            token = ("launch", next(self._numbers))
            self.release(token)
            self.acquire(token, actor)

    @contextmanager
    def acting_as(self, actor: Hashable) -> Iterator[None]:
        """Be somebody else in this thread for a while."""
        before = self.actor
        self._local.actor = actor
        try:
            yield
        finally:
            self._local.actor = before

    def read(self, span: Span, actor: Hashable | None = None) -> None:
        """Record that an actor (by default the thread's) reads a span."""
        self._access(span, actor, is_write=False)

    def write(self, span: Span, actor: Hashable | None = None) -> None:
        """Record that an actor (by default the thread's) writes a span."""
        self._access(span, actor, is_write=True)

    def release(self, token: Hashable, actor: Hashable | None = None) -> None:
        """Record a release. Call it before the act that lets others go on."""
        self.events.append(Release(actor=self._or_own(actor), token=token))

    def acquire(self, token: Hashable, actor: Hashable | None = None) -> None:
        """Record an acquire. Call it after the wait."""
        self.events.append(Acquire(actor=self._or_own(actor), token=token))

    def _access(self, span: Span, actor: Hashable | None, *, is_write: bool) -> None:
        if len(span.starts):
            self.events.append(Access(actor=self._or_own(actor), span=span, is_write=is_write))

    def _or_own(self, actor: Hashable | None) -> Hashable:
        return self.actor if actor is None else actor


_active: AccessLog | None = None


@contextmanager
def recording() -> Iterator[AccessLog]:
    """Record what the runners do that are made inside."""
    global _active
    before, _active = _active, AccessLog()
    try:
        yield _active
    finally:
        _active = before


def active_log() -> AccessLog | None:
    """Return the record that whoever is made now takes part in; None: nobody records."""
    return _active
