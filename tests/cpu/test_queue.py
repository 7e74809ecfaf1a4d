"""The queue of moves: who goes first, who joins whom, and what is left when it is over."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.tiers.move import Direction, Move, MoveState, Priority
from specoffload.tiers.queue import MoveQueue
from specoffload.tiers.transfer import ThreadMover

UP, DOWN = Direction.UP, Direction.DOWN


class Desk:
    """A queue whose threads stand still until `open`, and the order in which moves began."""

    def __init__(self, capacity: int = 100) -> None:
        self.queue = MoveQueue(capacity)
        self.begun: list[str] = []
        self._gates = {way: threading.Event() for way in Direction}
        self._entered = {way: threading.Event() for way in Direction}

    def block(self, *ways: Direction) -> list[Move]:
        """Keep the threads of some directions busy; return what they are busy with."""
        moves = []
        for way in ways:
            self._gates[way].clear()
            self._entered[way].clear()
            moves.append(
                self.queue.submit(lambda w=way: self._stand(w), way, Priority.DEMAND, key=way)
            )
        for way in ways:
            assert self._entered[way].wait(10)
        return moves

    def _stand(self, way: Direction) -> None:
        self._entered[way].set()
        assert self._gates[way].wait(10)

    def open(self, *ways: Direction) -> None:
        for way in ways or Direction:
            self._gates[way].set()

    def put(self, name: str, way: Direction, priority: Priority, *, num_bytes: int = 0) -> Move:
        return self.queue.submit(
            lambda: self.begun.append(name), way, priority, key=name, num_bytes=num_bytes
        )


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.open()
    made.queue.close()


@given(st.lists(st.sampled_from(Priority), min_size=1, max_size=12))
def test_the_most_urgent_begins_first_and_equals_in_order(priorities: list[Priority]) -> None:
    desk = Desk()
    desk.block(UP)
    moves = [desk.put(f"{i}", UP, p) for i, p in enumerate(priorities)]
    desk.open()
    _finish(moves)
    desk.queue.close()
    expected = sorted(range(len(priorities)), key=lambda i: priorities[i])
    assert desk.begun == [f"{i}" for i in expected]


def _finish(moves: list[Move]) -> None:
    """Wait without making anything a demand."""
    deadline = time.monotonic() + 10
    while not all(move.is_over for move in moves):
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def test_a_demand_overtakes_prefetches_and_never_waits_behind_a_store(desk: Desk) -> None:
    desk.block(UP, DOWN)
    prefetches = [desk.put(f"prefetch {i}", UP, Priority.PREFETCH) for i in range(3)]
    desk.put("store", DOWN, Priority.WRITE_DOWN)
    demand = desk.put("demand", UP, Priority.DEMAND)
    desk.open(UP)
    desk.queue.wait(demand)
    _finish(prefetches)
    assert desk.begun[0] == "demand"
    assert "store" not in desk.begun, "its thread is still busy"


def test_over_both_directions_write_downs_yield_to_loads_and_recalls_to_write_downs(
    desk: Desk,
) -> None:
    desk.block(UP, DOWN)
    moves = [
        desk.put("recall", UP, Priority.RECALL),
        desk.put("store", DOWN, Priority.WRITE_DOWN),
        desk.put("prefetch", UP, Priority.PREFETCH),
    ]
    desk.open(DOWN)
    time.sleep(0.02)
    assert desk.begun == [], "a store began while a prefetch was waiting"
    desk.open(UP)
    _finish(moves)
    assert desk.begun.index("prefetch") < desk.begun.index("store")
    # The recall was free to begin once the store had.
    assert set(desk.begun) == {"prefetch", "store", "recall"}


def test_a_recall_waits_while_a_store_is_waiting(desk: Desk) -> None:
    desk.block(UP, DOWN)
    store = desk.put("store", DOWN, Priority.WRITE_DOWN)
    recall = desk.put("recall", UP, Priority.RECALL)
    desk.open(UP)
    time.sleep(0.02)
    assert desk.begun == []
    desk.open(DOWN)
    _finish([store, recall])
    assert sorted(desk.begun) == ["recall", "store"]


def test_what_is_held_back_by_a_cancelled_move_begins(desk: Desk) -> None:
    desk.block(UP, DOWN)
    prefetch = desk.put("prefetch", UP, Priority.PREFETCH)
    store = desk.put("store", DOWN, Priority.WRITE_DOWN)
    desk.open(DOWN)
    assert desk.queue.cancel(prefetch)
    _finish([store])
    assert desk.begun == ["store"]
    assert prefetch.state is MoveState.CANCELLED


def test_what_is_waited_for_becomes_a_demand(desk: Desk) -> None:
    """Otherwise the main thread could wait for a store that yields to loads."""
    desk.block(UP, DOWN)
    desk.put("prefetch", UP, Priority.PREFETCH)
    store = desk.put("store", DOWN, Priority.WRITE_DOWN)
    desk.open(DOWN)
    desk.queue.wait(store)
    assert store.priority is Priority.DEMAND
    assert desk.begun == ["store"]


def test_a_duplicate_joins_what_is_in_flight_and_makes_it_as_urgent(desk: Desk) -> None:
    desk.block(UP)
    first = desk.put("a", UP, Priority.RECALL)
    other = desk.put("b", UP, Priority.PREFETCH)
    assert desk.put("a", UP, Priority.DEMAND) is first
    assert desk.put("b", UP, Priority.RECALL) is other
    assert (first.priority, other.priority) == (Priority.DEMAND, Priority.PREFETCH)
    desk.open()
    _finish([first, other])
    assert desk.begun == ["a", "b"]
    again = desk.put("a", UP, Priority.RECALL)
    assert again is not first, "what is over cannot be joined"
    _finish([again])


def test_a_move_is_dropped_only_when_nobody_holds_it(desk: Desk) -> None:
    desk.block(UP)
    move = desk.put("a", UP, Priority.PREFETCH)
    desk.put("a", UP, Priority.PREFETCH)
    assert desk.queue.cancel(move), "nothing to wait for: somebody else holds it"
    assert move.state is MoveState.WAITING
    assert desk.queue.cancel(move)
    assert move.state is MoveState.CANCELLED
    desk.open()


def test_a_running_move_is_not_free_when_it_is_given_up(desk: Desk) -> None:
    (running,) = desk.block(UP)
    assert not desk.queue.cancel(running)
    assert running.state is MoveState.RUNNING
    desk.open()
    desk.queue.wait(running)
    assert running.state is MoveState.DONE
    assert desk.queue.cancel(running)


@pytest.mark.parametrize("error", [OSError("disk"), AssertionError("bug"), KeyboardInterrupt()])
def test_what_a_copy_raises_comes_out_where_it_is_waited_for(
    desk: Desk, error: BaseException
) -> None:
    def broken() -> None:
        raise error

    move = desk.queue.submit(broken, UP, Priority.DEMAND, key="broken")
    desk.queue.wait(move)
    assert move.state is MoveState.FAILED
    with pytest.raises(type(error)):
        move.check()
    after = desk.put("after", UP, Priority.DEMAND)
    desk.queue.wait(after)
    after.check()
    assert desk.begun == ["after"], "the thread did not survive"


def test_the_queue_is_bounded_and_a_demand_is_not_held_up(desk: Desk) -> None:
    desk.queue = MoveQueue(2)
    desk.block(UP)
    moves = [desk.put(f"{i}", UP, Priority.PREFETCH, num_bytes=10) for i in range(2)]
    late = threading.Thread(
        target=lambda: moves.append(desk.put("late", UP, Priority.RECALL, num_bytes=10))
    )
    late.start()
    time.sleep(0.02)
    assert late.is_alive(), "a third move was let in"
    moves.append(desk.put("demand", UP, Priority.DEMAND, num_bytes=10))
    assert desk.queue.num_bytes == 30
    desk.open()
    late.join(10)
    assert not late.is_alive()
    _finish(moves)
    assert desk.begun[0] == "demand"
    assert desk.queue.num_bytes == 0
    assert desk.queue.num_unfinished == 0
    assert desk.queue.peak_bytes == 30


def test_closing_drops_what_waits_and_ends_the_threads(desk: Desk) -> None:
    before = threading.active_count()
    queue = desk.queue
    desk.block(UP, DOWN)
    assert threading.active_count() == before + 2
    waiting = [desk.put("a", UP, Priority.DEMAND), desk.put("b", DOWN, Priority.RECALL)]
    assert len(queue.drop_waiting()) == 2
    assert all(move.state is MoveState.CANCELLED for move in waiting)
    desk.open()
    queue.close()
    queue.close()
    assert threading.active_count() == before
    assert desk.begun == []
    with pytest.raises(RuntimeError, match="closed"):
        desk.put("late", UP, Priority.DEMAND)


def test_a_forgotten_mover_ends_its_threads() -> None:
    class Nothing:
        def read(self, *_: object) -> None:
            pass

    before = threading.active_count()
    mover = ThreadMover()
    places = np.zeros(1, np.int32)
    mover.load(Nothing(), None, places, places)  # type: ignore[arg-type]
    assert threading.active_count() == before + 1
    del mover
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == before


@given(data=st.data())
def test_any_mix_of_requests_ends_with_every_move_over(data: st.DataObject) -> None:
    """Each is run exactly once or cancelled, whatever is joined, raised, cancelled, waited for."""
    queue = MoveQueue(4)
    runs: dict[str, int] = {}
    moves: dict[str, list[Move]] = {}

    def run(name: str) -> None:
        runs[name] = runs.get(name, 0) + 1

    for _ in range(data.draw(st.integers(1, 25))):
        name = f"{data.draw(st.integers(0, 5))}"
        what = data.draw(st.sampled_from(["submit", "submit", "wait", "cancel", "drop"]))
        known = moves.get(name, [])
        if what == "submit":
            way, priority = (
                data.draw(st.sampled_from([UP, DOWN])),
                data.draw(st.sampled_from(Priority)),
            )
            moves.setdefault(name, []).append(
                queue.submit(lambda n=name: run(n), way, priority, key=name, num_bytes=1)
            )
        elif what == "drop":
            queue.drop_waiting()
        elif known and what == "wait":
            queue.wait(known[-1])
        elif known:
            queue.cancel(known[-1])
    for known in moves.values():
        for move in known:
            queue.wait(move)
    assert (queue.num_unfinished, queue.num_bytes) == (0, 0)
    for name, known in moves.items():
        done = {id(move) for move in known if move.state is MoveState.DONE}
        assert runs.get(name, 0) == len(done)
    queue.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")
def test_threads_that_copy_make_way_for_those_that_compute(desk: Desk) -> None:
    own = os.sched_getscheduler(0)
    found: list[int] = []
    for way in Direction:
        move = desk.queue.submit(
            lambda: found.append(os.sched_getscheduler(0)), way, Priority.DEMAND, key=way
        )
        desk.queue.wait(move)
    assert found == [os.SCHED_BATCH if own == os.SCHED_OTHER else own] * 2
    assert os.sched_getscheduler(0) == own
