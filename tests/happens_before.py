"""Finds accesses to the same memory that nothing orders, in a record of what happened.

Vector clocks: every actor counts its releases; an acquire takes over what the releaser knew. Two
accesses of one piece, one of them a write, are a race unless the later actor knows of the earlier
access. So a missing wait is found even where luck had the two in the right order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specoffload.tiers.access import Access, Acquire, Release

Clock = dict[Hashable, int]


@dataclass(frozen=True, kw_only=True)
class Race:
    """Two accesses of one piece that nothing orders; the first came first in the record."""

    first: Hashable
    first_writes: bool
    second: Hashable
    second_writes: bool
    space: str
    start: int

    def __str__(self) -> str:
        verbs = {True: "writes", False: "reads"}
        return (
            f"{_name(self.second)} {verbs[self.second_writes]} {self.space} {self.start:#x}, not"
            f" ordered after {_name(self.first)}, which {verbs[self.first_writes]} it"
        )


@dataclass
class _Piece:
    """Who wrote a piece last, and who read it since."""

    write: tuple[Hashable, int] | None = None
    reads: dict[Hashable, int] = field(default_factory=dict)


def races(events: Sequence[Access | Acquire | Release]) -> list[Race]:
    """Return every race in a record, in the order in which they show."""
    grain = _grains(events)
    clocks: dict[Hashable, Clock] = {}
    tokens: dict[Hashable, Clock] = {}
    pieces: dict[tuple[str, int], _Piece] = {}
    found: list[Race] = []
    for event in events:
        clock = clocks.setdefault(event.actor, {event.actor: 1})
        if isinstance(event, Release):
            _join(tokens.setdefault(event.token, {}), clock)
            clock[event.actor] += 1
        elif isinstance(event, Acquire):
            _join(clock, tokens.get(event.token, {}))
        else:
            space = event.span.space
            for start in _pieces_of(event, grain[space]):
                piece = pieces.setdefault((space, start), _Piece())
                found += _conflicts(event, clock, piece, start)
                if event.is_write:
                    piece.write = (event.actor, clock[event.actor])
                    piece.reads.clear()
                else:
                    piece.reads[event.actor] = clock[event.actor]
    return found


def _conflicts(event: Access, clock: Clock, piece: _Piece, start: int) -> list[Race]:
    earlier = [] if piece.write is None else [(*piece.write, True)]
    if event.is_write:
        earlier += [(actor, time, False) for actor, time in piece.reads.items()]
    return [
        Race(
            first=actor,
            first_writes=wrote,
            second=event.actor,
            second_writes=event.is_write,
            space=event.span.space,
            start=start,
        )
        for actor, time, wrote in earlier
        if clock.get(actor, 0) < time
    ]


def _grains(events: Sequence[Access | Acquire | Release]) -> dict[str, int]:
    """Return the largest pieces that every access of a space is made of."""
    grains: dict[str, int] = {}
    for event in events:
        if isinstance(event, Access):
            span = event.span
            ends = np.append(span.starts, span.size)
            grains[span.space] = int(np.gcd.reduce(np.append(ends, grains.get(span.space, 0))))
    return grains


def _pieces_of(event: Access, grain: int) -> list[int]:
    inside = np.arange(0, event.span.size, grain)
    return (event.span.starts[:, None] + inside).ravel().tolist()


def _join(clock: Clock, other: Clock) -> None:
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


def _name(actor: Hashable) -> str:
    return actor if isinstance(actor, str) else f"a move {getattr(actor, 'direction', actor)}"
