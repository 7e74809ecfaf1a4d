"""What waits to be copied, in order of urgency, and the two threads that copy it.

Knows priorities and directions. Refuses to know what a job copies.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable

from specoffload.tiers.access import active_log
from specoffload.tiers.move import Direction, Move, MoveState, Priority


class MoveQueue:
    """Runs moves on one thread for each direction, the most urgent first.

    A thread starts nothing while something more urgent waits in the other direction: both use the
    same memory bus or the same disk. What runs is never interrupted. Between two moves no order is
    promised beyond that: whoever needs one waits for the first before it submits the second.

    Args:
        capacity: most moves that wait at once; `submit` blocks at more. Demands do not count, as
            they must not wait behind what they overtake; their requesters bound them.

    Attributes:
        peak_bytes: most bytes held for unfinished moves at once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # Re-entrant: the collector of garbage may call `stop` from inside any statement.
        self._lock = threading.RLock()
        self._has_work = {way: threading.Condition(self._lock) for way in Direction}
        self._has_room = threading.Condition(self._lock)
        self._is_over = threading.Condition(self._lock)
        self._waiting: tuple[deque[Move], ...] = tuple(deque() for _ in Priority)
        self._unfinished: dict[Hashable, Move] = {}
        self._threads: dict[Direction, threading.Thread] = {}
        self._closed = False
        self._log = active_log()
        self._any_over = ("any move over", object())
        self._num_bytes = 0
        self.peak_bytes = 0

    @property
    def num_unfinished(self) -> int:
        """Moves that wait or run."""
        return len(self._unfinished)

    @property
    def num_bytes(self) -> int:
        """Bytes held for moves that wait or run."""
        return self._num_bytes

    def submit(
        self,
        run: Callable[[], None],
        direction: Direction,
        priority: Priority,
        *,
        key: Hashable,
        num_bytes: int = 0,
    ) -> Move:
        """Queue a copy, or join the one in flight that has the same key.

        Everything that the caller did before happens before the copy, unless it joined: what is in
        flight may have begun.

        Args:
            run: does the copy, on the direction's thread.
            direction: whose thread.
            priority: how urgent; one that is joined becomes at least as urgent.
            key: two moves of one key do exactly the same.
            num_bytes: what is held until it is over, for `num_bytes` and `peak_bytes`.
        """
        with self._lock:
            while True:
                found = self._unfinished.get(key)
                if found is not None:
                    self._hold(found, priority)
                    return found
                if priority is Priority.DEMAND or self._num_lesser() < self._capacity:
                    break
                self._has_room.wait()
            if self._closed:
                raise RuntimeError("the queue of moves is closed")
            move = Move(run, direction, priority, key, num_bytes)
            if self._log is not None:
                self._log.release(("begin", move))
            self._unfinished[key] = move
            self._num_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._num_bytes)
            self._waiting[priority].append(move)
            if direction not in self._threads:
                self._start(direction)
            self._has_work[direction].notify()
            return move

    def join(self, move: Move, priority: Priority) -> None:
        """Hold a move that somebody else submitted, which becomes at least this urgent."""
        with self._lock:
            self._hold(move, priority)

    def cancel(self, move: Move) -> bool:
        """Let go of a move; drop it if nobody else holds it and it has not begun.

        Returns:
            False where the move runs and nobody else holds it: its places are free when it is over.
            If it is over by now, what it did happens before the return.
        """
        with self._lock:
            move.num_holders -= 1
            if move.state is MoveState.WAITING and move.num_holders <= 0:
                self._waiting[move.priority].remove(move)
                self._finish(move, MoveState.CANCELLED)
                # What was held back by this one may start now.
                self._has_work[move.direction.other].notify()
            if move.is_over and self._log is not None:
                self._log.acquire(("over", move))
            return move.is_over or move.num_holders > 0

    def wait(self, move: Move) -> None:
        """Return when a move is over. What is waited for is a demand from now on.

        Everything that the copy did happens before the return.
        """
        with self._lock:
            self._raise_to(move, Priority.DEMAND)
            while not move.is_over:
                self._is_over.wait()
        if self._log is not None:
            self._log.acquire(("over", move))

    def drop_waiting(self) -> list[Move]:
        """Cancel every move that has not begun, whoever holds it; return those that run.

        What the others did happens before the return.
        """
        with self._lock:
            if self._log is not None:
                self._log.acquire(self._any_over)
            for queue in self._waiting:
                while queue:
                    self._finish(queue.popleft(), MoveState.CANCELLED)
            # A submit that an interrupt tore apart may have left a move that nobody will ever run.
            running = [m for m in self._unfinished.values() if m.state is MoveState.RUNNING]
            self._unfinished = {move.key: move for move in running}
            return running

    def stop(self) -> None:
        """Take nothing more, drop what waits, and let the threads end when what runs is over."""
        with self._lock:
            self._closed = True
            self.drop_waiting()
            for condition in self._has_work.values():
                condition.notify()

    def close(self) -> None:
        """Stop, and return when the threads have ended. Idempotent."""
        self.stop()
        for thread in self._threads.values():
            thread.join()

    # ---- under the lock

    def _hold(self, move: Move, priority: Priority) -> None:
        move.num_holders += 1
        self._raise_to(move, priority)

    def _raise_to(self, move: Move, priority: Priority) -> None:
        if priority < move.priority:
            if move.state is MoveState.WAITING:
                self._waiting[move.priority].remove(move)
                self._waiting[priority].append(move)
                self._has_work[move.direction].notify()
            move.priority = priority

    def _num_lesser(self) -> int:
        return sum(map(len, self._waiting[Priority.DEMAND + 1 :]))

    def _take(self, direction: Direction) -> Move | None:
        """Return the next move of a direction, None if there is none that may start."""
        for queue in self._waiting:
            for move in queue:
                if move.direction is direction:
                    queue.remove(move)
                    move.state = MoveState.RUNNING
                    # What was held back by this one may start now.
                    self._has_work[direction.other].notify()
                    self._has_room.notify()
                    return move
            if queue:
                return None
        return None

    def _finish(self, move: Move, state: MoveState) -> None:
        move.state = state
        move.run = None
        del self._unfinished[move.key]
        self._num_bytes -= move.num_bytes
        self._is_over.notify_all()
        self._has_room.notify()

    # ---- the threads

    def _start(self, direction: Direction) -> None:
        thread = threading.Thread(
            target=self._work, args=(direction,), name=f"specoffload-{direction.value}", daemon=True
        )
        self._threads[direction] = thread
        thread.start()

    def _work(self, direction: Direction) -> None:
        _make_way()
        while True:
            with self._lock:
                while (move := self._take(direction)) is None:
                    if self._closed:
                        return
                    self._has_work[direction].wait()
                run = move.run
            assert run is not None
            try:
                if self._log is None:
                    run()
                else:
                    # Each move is an actor of its own: that one thread runs them orders nothing.
                    with self._log.acting_as(move):
                        self._log.acquire(("begin", move))
                        run()
            except BaseException as error:  # raised again by whoever waits for the move
                move.error = error
            if self._log is not None:
                self._log.release(("over", move), actor=move)
                self._log.release(self._any_over, actor=move)
            with self._lock:
                self._finish(move, MoveState.DONE if move.error is None else MoveState.FAILED)
            del run, move  # an idle thread keeps no block alive


def _make_way() -> None:
    """Let threads that compute go before this one when both want a core.

    Copies take long stretches, and a parallel operation is as slow as its slowest thread. Where the
    user or the system has chosen another scheduling, it stays.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
