"""The table of blocks against a plain model of what each place holds.

The model keeps the contents that real memory would have: a slot or a home holds the name of a
block, or poison once it was freed. So a block that was lost, served from a reused place, or freed
while it was being copied shows as wrong contents, not only as a wrong count.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specoffload.core.policy import lru
from specoffload.core.residency import MoveKind, NoRoomError, Residency, Ticket, TicketState

LAYERS, ROWS, BLOCKS = 2, 2, 4
SIZE = LAYERS * ROWS * BLOCKS
NUM_SLOTS, NUM_HOST, NUM_EXTENTS = 6, 3, 7
POISON = -7


def make() -> Residency:
    return Residency(
        num_layers=LAYERS,
        num_rows=ROWS,
        num_blocks=BLOCKS,
        num_slots=NUM_SLOTS,
        num_host_slots=NUM_HOST,
        num_extents=NUM_EXTENTS,
    )


class ResidencyMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = make()
        self.slots = np.full(NUM_SLOTS, POISON)
        self.homes = np.full(NUM_HOST + NUM_EXTENTS, POISON)
        self.alive: set[int] = set()
        self.sealed: set[int] = set()
        self.open: list[Ticket] = []
        self.round = 0

    def draw(self, data: st.DataObject, units: list[int], at_least: int = 1) -> np.ndarray:
        chosen = data.draw(st.lists(st.sampled_from(units), min_size=at_least, unique=True))
        return np.array(chosen, np.int64)

    def in_flight(self) -> set[int]:
        return {int(unit) for ticket in self.open for unit in ticket.units}

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        new = [unit for unit in range(SIZE) if unit not in self.alive]
        if not new:
            return
        units = self.draw(data, new)
        if len(units) > self.table.num_free_slots:
            before = self.table.slot.copy()
            with pytest.raises(NoRoomError):
                self.table.claim(units)
            assert (self.table.slot == before).all()
            return
        slots = self.table.claim(units)
        assert (self.slots[slots] == POISON).all(), "a slot was handed out while it was held"
        self.slots[slots] = units
        self.alive |= set(units.tolist())

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        able = [u for u in self.alive - self.sealed if self.table.slot.ravel()[u] >= 0]
        if able:
            units = self.draw(data, sorted(able))
            self.table.seal(units)
            self.sealed |= set(units.tolist())

    @rule(data=st.data())
    def prepare_store(self, data: st.DataObject) -> None:
        able = self.table.unstored().tolist()
        if not able:
            return
        units = self.draw(data, able)
        if len(units) > self.table.num_free_homes:
            with pytest.raises(NoRoomError):
                self.table.prepare_store(units)
            return
        self.open.append(self.table.prepare_store(units))

    @rule(data=st.data())
    def prepare_load(self, data: st.DataObject) -> None:
        able = self.table.loadable().tolist()
        if not able:
            return
        units = self.draw(data, able)
        if len(units) > self.table.num_free_slots:
            with pytest.raises(NoRoomError):
                self.table.prepare_load(units)
            return
        self.open.append(self.table.prepare_load(units))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), how=st.sampled_from(["complete", "fail", "cancel"]))
    def end_ticket(self, data: st.DataObject, how: str) -> None:
        ticket = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if ticket.kind is MoveKind.STORE:
            assert (self.slots[ticket.slots] == ticket.units).all(), "store read a reused slot"
            assert (self.homes[ticket.homes] == POISON).all(), "store wrote over a home in use"
            if how == "complete":
                self.homes[ticket.homes] = ticket.units
        else:
            assert (self.homes[ticket.homes] == ticket.units).all(), "load read a reused home"
            assert (self.slots[ticket.slots] == POISON).all(), "load wrote over a slot in use"
            if how == "complete":
                self.slots[ticket.slots] = ticket.units
        getattr(self.table, how)(ticket)
        for again in (self.table.complete, self.table.fail, self.table.cancel):
            with pytest.raises(RuntimeError, match="cannot become"):
                again(ticket)
        assert ticket.state is not TicketState.PREPARED

    @rule(data=st.data(), count=st.integers(1, NUM_SLOTS))
    def demote(self, data: st.DataObject, count: int) -> None:
        candidates = self.table.demotable()
        units = lru.victims(self.table, candidates, count)
        assert len(units) == min(count, len(candidates))
        ages = self.table.last_use
        left = np.setdiff1d(candidates, units)
        if len(units) and len(left):
            assert ages[units].max() <= ages[left].min(), "a more recent block left first"
        freed = self.table.demote(units)
        assert (self.slots[freed] == units).all()
        self.slots[freed] = POISON

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        able = sorted(set(range(SIZE)) - self.in_flight())
        units = self.draw(data, able)
        homes = self.table.home.ravel()[units]
        freed = self.table.drop(units)
        self.slots[freed] = POISON
        self.homes[homes[homes >= 0]] = POISON
        self.alive -= set(units.tolist())
        self.sealed -= set(units.tolist())

    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.round += 1
        if self.alive:
            self.table.touch(self.draw(data, sorted(self.alive)), self.round)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.table.check()
        slot, home = self.table.slot.ravel(), self.table.home.ravel()
        stored = self.table.stored.ravel()
        for unit in self.alive:
            readable = []
            if slot[unit] >= 0:
                readable.append(self.slots[slot[unit]])
            if stored[unit]:
                readable.append(self.homes[home[unit]])
            assert readable, f"block {unit} is nowhere"
            assert all(content == unit for content in readable), f"block {unit} was overwritten"
        held = (slot >= 0).sum() + sum(len(t.units) for t in self.open if t.kind is MoveKind.LOAD)
        assert held + self.table.num_free_slots == NUM_SLOTS


TestResidency = ResidencyMachine.TestCase


def test_slots_that_are_retired_lose_no_block() -> None:
    places = np.array([0, 1, 2, 7, 8, 9], np.int32)
    table = Residency(num_layers=1, num_rows=1, num_blocks=4, num_slots=places)
    units = table.units(0, 0, np.arange(4))
    slots = table.claim(units)
    memory = np.full(10, POISON)
    memory[slots] = units
    with pytest.raises(NoRoomError, match="4 blocks do not fit 3 slots"):
        table.retire_slots(places[3:])
    table.drop(units[:1])
    source, target = table.retire_slots(places[3:])
    memory[target] = memory[source]
    assert table.num_slots == 3
    assert table.num_free_slots == 0
    assert (memory[table.slot.ravel()[units[1:]]] == units[1:]).all()
    assert table.slot.max() < 3
    table.check()


def test_host_slots_are_taken_before_extents() -> None:
    table = make()
    units = table.units(0, 0, np.arange(4))
    table.claim(units)
    table.seal(units)
    ticket = table.prepare_store(units)
    assert (ticket.homes[:NUM_HOST] < NUM_HOST).all()
    assert (ticket.homes[NUM_HOST:] >= NUM_HOST).all()


def test_ties_of_recency_go_to_the_earliest_block_and_take_turns_over_layers() -> None:
    table = make()
    units = table.units(np.arange(LAYERS)[:, None], 0, np.arange(3)[None, :])
    table.claim(units)
    table.seal(units)
    table.complete(table.prepare_store(units))
    victims = lru.victims(table, table.demotable(), 3)
    assert victims.tolist() == table.units([0, 1, 0], 0, [0, 0, 1]).tolist()


@pytest.mark.parametrize("wrong", ["slot", "home", "stored", "sealed", "in_flight", "last_use"])
def test_the_table_cannot_be_changed_from_outside(wrong: str) -> None:
    with pytest.raises(ValueError, match="read-only"):
        getattr(make(), wrong)[...] = 1
