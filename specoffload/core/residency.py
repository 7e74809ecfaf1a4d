"""Where each (layer, row, block) is, and which moves are legal.

Arrays, not objects: a unit is one block of one layer of one row, named by its flat index. This
file decides nothing and copies nothing: it hands out places, takes them back, and refuses what
would lose a block or give one place away twice. Places: *slots* of the device arena, and *homes*
below it (host slots first, then extents of the spill file). A block that is sealed (full and
committed) never changes again, so it is stored at most once, and demoting it afterwards costs
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.int64]
Places = npt.NDArray[np.int32]
_T = TypeVar("_T", bound=np.generic)


class MoveKind(Enum):
    """Which way a ticket's blocks go."""

    STORE = "store"
    """Device slot to home; the block stays readable in its slot."""
    LOAD = "load"
    """Home to a new device slot; the block becomes readable there on completion."""


class TicketState(Enum):
    """A ticket leaves PREPARED exactly once."""

    PREPARED = "prepared"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(kw_only=True, eq=False)
class Ticket:
    """Blocks in flight, with the place each one leaves and the place it goes to.

    Attributes:
        kind: the direction.
        units: the blocks, `[n]`.
        slots: their device slots, `[n]`.
        homes: their homes, `[n]`; host slots count from 0, extents from `num_host_slots`.
        state: where the move stands.
    """

    kind: MoveKind
    units: Units
    slots: Places
    homes: Places
    state: TicketState = field(default=TicketState.PREPARED)


class NoRoomError(RuntimeError):
    """More places were asked for than are free; the caller frees some first."""


class _FreeList:
    """Places not in use: a stack, so that what was freed last is used first."""

    def __init__(self, places: Places) -> None:
        self._stack = places[::-1].copy()
        self._size = len(places)
        self._is_free = np.zeros(int(places.max(initial=-1)) + 1, bool)
        self._is_free[places] = True

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        return len(self._stack)

    def take(self, count: int) -> Places:
        if count > self._size:
            raise NoRoomError(f"{count} places wanted, {self._size} of {self.capacity} free")
        places = self._stack[self._size - count : self._size][::-1].copy()
        self._size -= count
        self._is_free[places] = False
        return places

    def give(self, places: Places) -> None:
        assert not self._is_free[places].any(), "a place was freed twice"
        self._is_free[places] = True
        self._stack[self._size : self._size + len(places)] = places[::-1]
        self._size += len(places)

    def retire(self, places: Places) -> None:
        """Take free places out of use for good."""
        assert self._is_free[places].all(), "a place in use cannot be retired"
        self._is_free[places] = False
        free = self._stack[: self._size]
        left = free[~np.isin(free, places)]
        self._stack = np.concatenate([left, np.zeros(self.capacity - self._size, np.int32)])
        self._size = len(left)


class Residency:
    """The table of one model's blocks.

    Args:
        num_layers: layers that hold KV.
        num_rows: sequences of the call.
        num_blocks: most blocks that a row can have in a layer.
        num_slots: places in the device arena, or the places themselves; staging slots are not
            among them.
        num_host_slots: places in the host arena.
        num_extents: places in the spill file.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_rows: int,
        num_blocks: int,
        num_slots: int | Places,
        num_host_slots: int = 0,
        num_extents: int = 0,
    ) -> None:
        self.shape = (num_layers, num_rows, num_blocks)
        self.num_host_slots = num_host_slots
        size = num_layers * num_rows * num_blocks
        self._slot = np.full(size, -1, np.int32)
        self._home = np.full(size, -1, np.int32)
        self._sealed = np.zeros(size, bool)
        self._stored = np.zeros(size, bool)
        self._in_flight = np.zeros(size, bool)
        self._last_use = np.zeros(size, np.int64)
        places = np.arange(num_slots) if isinstance(num_slots, int) else num_slots
        self._slots = _FreeList(places.astype(np.int32))
        # Host slots are taken before extents: within one list the lower numbers go first.
        self._homes = _FreeList(np.arange(num_host_slots + num_extents, dtype=np.int32))
        self._loading: set[Ticket] = set()

    # ---- looking: never changes anything

    @property
    def slot(self) -> npt.NDArray[np.int32]:
        """Device slot of every block, `[layer, row, block]`; -1 = not resident. Read only."""
        return _frozen(self._slot).reshape(self.shape)

    @property
    def home(self) -> npt.NDArray[np.int32]:
        """Home of every block, `[layer, row, block]`; -1 = none. Read only."""
        return _frozen(self._home).reshape(self.shape)

    @property
    def stored(self) -> npt.NDArray[np.bool_]:
        """Whether a block's home holds it completely, `[layer, row, block]`. Read only."""
        return _frozen(self._stored).reshape(self.shape)

    @property
    def sealed(self) -> npt.NDArray[np.bool_]:
        """Whether a block is full and committed, `[layer, row, block]`. Read only."""
        return _frozen(self._sealed).reshape(self.shape)

    @property
    def in_flight(self) -> npt.NDArray[np.bool_]:
        """Whether a ticket is open for a block, `[layer, row, block]`. Read only."""
        return _frozen(self._in_flight).reshape(self.shape)

    @property
    def last_use(self) -> npt.NDArray[np.int64]:
        """The round in which a block was last attended, by flat index. Read only."""
        return _frozen(self._last_use)

    @property
    def num_free_slots(self) -> int:
        """Device slots not in use."""
        return len(self._slots)

    @property
    def num_slots(self) -> int:
        """Device slots in all."""
        return self._slots.capacity

    @property
    def num_free_homes(self) -> int:
        """Host slots and extents not in use."""
        return len(self._homes)

    @property
    def num_homes(self) -> int:
        """Host slots and extents in all."""
        return self._homes.capacity

    def units(self, layers: npt.ArrayLike, rows: npt.ArrayLike, blocks: npt.ArrayLike) -> Units:
        """Return the flat indices of blocks; the three arguments are broadcast."""
        _, num_rows, num_blocks = self.shape
        flat = np.asarray(layers, np.int64) * num_rows + np.asarray(rows, np.int64)
        return np.asarray(flat * num_blocks + np.asarray(blocks, np.int64)).ravel()

    def demotable(self) -> Units:
        """Return the blocks that may leave their slot now: stored, resident, not in flight."""
        return np.flatnonzero(self._stored & (self._slot >= 0) & ~self._in_flight)

    def loadable(self) -> Units:
        """Return the blocks that could come back to a slot, most recently written first."""
        found = np.flatnonzero(self._stored & (self._slot < 0) & ~self._in_flight)
        return found[np.argsort(-(found % self.shape[2]), kind="stable")]

    def unstored(self) -> Units:
        """Return the sealed, resident blocks that have no home yet, oldest block first."""
        found = np.flatnonzero(
            self._sealed & (self._home < 0) & (self._slot >= 0) & ~self._in_flight
        )
        return found[np.argsort(found % self.shape[2], kind="stable")]

    def check(self) -> None:
        """Assert conservation: every place is free or held by exactly one block or load."""
        loading = [ticket.slots for ticket in self._loading]
        held = np.concatenate([self._slot[self._slot >= 0], *loading])
        assert len(np.unique(held)) == len(held), "two blocks share a slot"
        assert len(held) + len(self._slots) == self._slots.capacity, "a slot was lost"
        homes = self._home[self._home >= 0]
        assert len(np.unique(homes)) == len(homes), "two blocks share a home"
        assert len(homes) + len(self._homes) == self._homes.capacity, "a home was lost"
        assert not (self._sealed & (self._slot < 0) & ~self._stored).any(), "a block was lost"
        assert not (self._stored & (self._home < 0)).any(), "stored, but nowhere"

    # ---- changing: all or nothing

    def claim(self, units: Units) -> Places:
        """Give each of these new blocks a device slot, and return the slots.

        Raises:
            NoRoomError: fewer slots are free; nothing was claimed.
        """
        assert (self._slot[units] < 0).all(), "already resident"
        assert (self._home[units] < 0).all(), "not new"
        slots = self._slots.take(len(units))
        self._slot[units] = slots
        return slots

    def seal(self, units: Units) -> None:
        """Mark blocks as full and committed: from now on they never change."""
        assert (self._slot[units] >= 0).all(), "an absent block cannot become full"
        self._sealed[units] = True

    def touch(self, units: Units, round_index: int) -> None:
        """Record that blocks were attended by committed tokens of a round."""
        self._last_use[units] = round_index

    def prepare_store(self, units: Units) -> Ticket:
        """Reserve a home for each of these sealed blocks; their slots are pinned until the end.

        Raises:
            NoRoomError: fewer homes are free; nothing was reserved.
        """
        assert self._sealed[units].all(), "only full blocks are stored"
        assert (self._slot[units] >= 0).all(), "not resident"
        assert (self._home[units] < 0).all(), "already stored"
        assert not self._in_flight[units].any(), "already in flight"
        homes = self._homes.take(len(units))
        self._home[units] = homes
        self._in_flight[units] = True
        return Ticket(kind=MoveKind.STORE, units=units, slots=self._slot[units].copy(), homes=homes)

    def prepare_load(self, units: Units) -> Ticket:
        """Reserve a slot for each of these stored, absent blocks; not readable until completed.

        Raises:
            NoRoomError: fewer slots are free; nothing was reserved.
        """
        assert (self._slot[units] < 0).all(), "already resident"
        assert self._stored[units].all(), "nothing to load from"
        assert not self._in_flight[units].any(), "already in flight"
        slots = self._slots.take(len(units))
        self._in_flight[units] = True
        ticket = Ticket(
            kind=MoveKind.LOAD, units=units, slots=slots, homes=self._home[units].copy()
        )
        self._loading.add(ticket)
        return ticket

    def complete(self, ticket: Ticket) -> None:
        """Record that every copy of a ticket is done."""
        self._leave(ticket, TicketState.COMPLETED)
        if ticket.kind is MoveKind.STORE:
            self._stored[ticket.units] = True
        else:
            self._slot[ticket.units] = ticket.slots

    def fail(self, ticket: Ticket) -> None:
        """Record that a ticket's copies did not succeed: its blocks are where they were before."""
        self._undo(ticket, TicketState.FAILED)

    def cancel(self, ticket: Ticket) -> None:
        """Take a ticket back. Precondition: no copy of it is running any more."""
        self._undo(ticket, TicketState.CANCELLED)

    def demote(self, units: Units) -> Places:
        """Free the slots of stored blocks, which stay in their homes; return the slots."""
        assert self._stored[units].all(), "would lose a block"
        assert (self._slot[units] >= 0).all(), "not resident"
        assert not self._in_flight[units].any(), "in flight"
        slots = self._slot[units].copy()
        self._slot[units] = -1
        self._slots.give(slots)
        return slots

    def retire_slots(self, slots: Places) -> tuple[Places, Places]:
        """Take slots out of use; the blocks in them move to free slots among the others.

        Returns:
            The slots that blocks leave and, in the same order, those that they go to; the caller
            copies them at once.

        Raises:
            NoRoomError: the blocks in them do not fit the others; nothing was changed.
        """
        assert not self._in_flight.any(), "in flight"
        moving = np.flatnonzero(np.isin(self._slot, slots))
        others = self._slots.capacity - len(slots)
        held = self._slots.capacity - len(self._slots)
        if held > others:
            raise NoRoomError(f"{held} blocks do not fit {others} slots")
        source = self._slot[moving].copy()
        self._slots.retire(np.setdiff1d(slots, source).astype(np.int32))
        target = self._slots.take(len(moving))
        self._slot[moving] = target
        self._slots.give(source)
        self._slots.retire(source)
        return source, target

    def drop(self, units: Units) -> Places:
        """Forget blocks for ever, wherever they are; return the slots that became free.

        Precondition: no move of them is in flight. Blocks that do not exist are ignored.
        """
        assert not self._in_flight[units].any(), "in flight"
        held = units[self._slot[units] >= 0]
        slots = self._slot[held].copy()
        self._slots.give(slots)
        housed = units[self._home[units] >= 0]
        self._homes.give(self._home[housed].copy())
        self._slot[units] = -1
        self._home[units] = -1
        self._sealed[units] = False
        self._stored[units] = False
        return slots

    def _leave(self, ticket: Ticket, state: TicketState) -> None:
        if ticket.state is not TicketState.PREPARED:
            raise RuntimeError(f"a ticket that is {ticket.state.value} cannot become {state.value}")
        ticket.state = state
        self._in_flight[ticket.units] = False
        self._loading.discard(ticket)

    def _undo(self, ticket: Ticket, state: TicketState) -> None:
        self._leave(ticket, state)
        if ticket.kind is MoveKind.STORE:
            self._home[ticket.units] = -1
            self._homes.give(ticket.homes)
        else:
            self._slots.give(ticket.slots)


def _frozen(array: npt.NDArray[_T]) -> npt.NDArray[_T]:
    view = array.view()
    view.flags.writeable = False
    return view
