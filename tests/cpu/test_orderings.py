"""No read or write races with another: judged by the record of accesses, not by luck."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from happens_before import races
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_bench import TOKENS, Bench, shape_of
from vocabulary import assert_exact, draft_of, minimum_budget, prompt, target_of

from specoffload import SpecOffloadConfig, SpecOffloadRunner
from specoffload.tiers.access import (
    COMPUTE,
    MEMORY,
    Access,
    AccessLog,
    Acquire,
    Guard,
    Release,
    Span,
    recording,
)
from specoffload.tiers.faults import Fault, FaultKind, FaultyCalls
from specoffload.tiers.move import Direction, Move
from specoffload.tiers.transfer import ThreadMover

# The checker itself.


def access(actor: str, start: int, *, writes: bool, size: int = 64) -> Access:
    span = Span(space=MEMORY, starts=np.array([start]), size=size)
    return Access(actor=actor, span=span, is_write=writes)


def ordered(first: str, second: str, token: str) -> list[Acquire | Release]:
    return [Release(actor=first, token=token), Acquire(actor=second, token=token)]


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_two_accesses_that_nothing_orders_are_a_race(first: bool, second: bool) -> None:
    events: list[Any] = [access("a", 64, writes=first), access("b", 64, writes=second)]
    (race,) = races(events)
    assert (race.first, race.second) == ("a", "b")
    assert "not ordered after a" in str(race)
    assert races([events[0], *ordered("a", "b", "t"), events[1]]) == []
    # A token from before the first access, or given to somebody else, orders nothing.
    assert races([*ordered("a", "b", "t"), *events])
    assert races([events[0], *ordered("a", "c", "t"), events[1]])
    # Through a third one it does.
    assert not races([events[0], *ordered("a", "c", "t"), *ordered("c", "b", "u"), events[1]])


def test_reads_do_not_race_and_pieces_that_only_touch_do_not_either() -> None:
    assert races([access("a", 0, writes=False), access("b", 0, writes=False)]) == []
    assert races([access("a", 0, writes=True), access("b", 64, writes=True)]) == []
    assert races([access("a", 0, writes=True), access("b", 32, writes=True, size=96)])


def test_a_write_must_come_after_every_reader() -> None:
    events = [
        access("a", 0, writes=True),
        *ordered("a", "b", "t"),
        *ordered("a", "c", "u"),
        access("b", 0, writes=False),
        access("c", 0, writes=False),
        *ordered("b", "a", "v"),
    ]
    (race,) = races([*events, access("a", 0, writes=True)])
    assert race.first == "c"
    assert races([*events, *ordered("c", "a", "w"), access("a", 0, writes=True)]) == []


# The engine with all of its waits.

DELAYS = (
    Fault(verb="read", kind=FaultKind.DELAY, delay_s=0.003),
    Fault(verb="write", kind=FaultKind.DELAY, delay_s=0.003),
)


@settings(max_examples=max(10, settings.default.max_examples // 3))
@given(
    data=st.data(),
    block_size=st.sampled_from([1, 4, 8]),
    host=st.sampled_from([0, 3, 1000]),
    extra=st.integers(0, 12),
    windows=st.sampled_from([(None, None), (5, None)]),
    seed=st.integers(0, 2**16),
)
def test_no_plan_has_a_race_whatever_is_slow(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    block_size: int,
    host: int,
    extra: int,
    windows: tuple[int | None, ...],
    seed: int,
) -> None:
    with recording() as log:
        bench = Bench(
            tmp_path_factory.mktemp("pool"),
            shape_of(block_size, windows),
            host=host,
            extra=extra,
            step=5,
            calls=FaultyCalls(*DELAYS, seed=seed),
        )
        left = [TOKENS, TOKENS]
        while max(left) > 0:
            num_new = [min(n, data.draw(st.integers(1, 5))) for n in left]
            accepted = [data.draw(st.integers(min(1, n), n)) for n in num_new]
            bench.round(num_new, accepted)
            left = [n - a for n, a in zip(left, accepted, strict=True)]
            if data.draw(st.integers(0, 9)) == 0:
                bench.forget()
                break
        bench.close()
    assert not races(log.events)
    assert any(isinstance(event, Access) and event.actor == COMPUTE for event in log.events)


def test_a_whole_call_has_no_race(tmp_path: Path) -> None:
    with recording() as log, _tight_runner(tmp_path) as runner:
        for seed in range(2):
            assert_exact(runner, target_of("gemma3"), prompt(60, seed=seed), max_new_tokens=16)
        assert runner.report().bytes_up > 0
        assert runner.report().blocks_written > 0
    found = races(log.events)
    assert not found, "\n".join(map(str, found[:10]))
    assert sum(isinstance(event, Access) for event in log.events) > 500


def _tight_runner(folder: Path, family: str = "gemma3") -> SpecOffloadRunner:
    draft, target = draft_of(family, "noisy"), target_of(family)
    options: dict[str, Any] = {
        "block_size": 4,
        "num_draft_tokens": 4,
        "host_budget": "32KiB",
        "disk_path": folder,
        "prefill_chunk": 16,
        "poison": True,
    }
    minimum = minimum_budget(draft, target, SpecOffloadConfig(**options))
    return SpecOffloadRunner(
        draft, target, SpecOffloadConfig(device_budget=minimum + 4096, **options)
    )


def test_nothing_is_recorded_unless_somebody_asks(tmp_path: Path) -> None:
    with recording() as log:
        pass
    bench = Bench(tmp_path, shape_of(4), host=0, extra=0, step=4)
    bench.rounds(4)
    bench.close()
    assert log.events == []


# The engine without one of its waits: the checker must miss it.


def without(guard: Guard) -> Callable[[ThreadMover, Move, Guard], None]:
    """Return a `ThreadMover.wait` that does not wait where it should protect this."""
    wait = ThreadMover.wait

    def forgetful(mover: ThreadMover, move: Move, asked: Guard) -> None:
        if asked is not guard:
            wait(mover, move, asked)

    return forgetful


SLOW = (
    Fault(verb="read", kind=FaultKind.DELAY, least_delay_s=0.02, delay_s=0.02),
    Fault(verb="write", kind=FaultKind.DELAY, least_delay_s=0.02, delay_s=0.02),
)
"""Slow enough for the main thread to be elsewhere before a copy is over."""


def stream_and_interrupt(bench: Bench) -> None:
    """Fill the smallest device, then give passes up while their loads run."""
    bench.rounds(6)
    for _ in range(3):
        bench.calls.inject(*SLOW)
        with pytest.raises(KeyboardInterrupt):
            bench.interrupted_pass([0])
        bench.pool.settle(0, 0)
        bench.discarded_pass(1)  # wants other blocks in the staging slots
        bench.calls.inject()
    bench.round([4, 4], [4, 4])


def promote_and_forget(bench: Bench) -> None:
    """Bring blocks back to what a row left, join them on their way, and forget all in between."""
    for joins in (True, True, False):
        bench.rounds(7)
        bench.pool.release(0)
        bench.texts[0] = bench.texts[0][..., :0, :]
        bench.calls.inject(*(SLOW if joins else ()))
        bench.round([0, 1], [0, 1])
        while not joins and any(not move.is_over for _, move in bench.pool.loads_in_flight()):
            time.sleep(0.001)
        bench.round([0, 1], [0, 1])
        bench.calls.inject()
        bench.forget()
    for _ in range(3):
        bench.round([4, 4], [4, 4])
        bench.calls.inject(*SLOW)
        bench.round([4, 4], [4, 4])
        bench.forget()
        bench.calls.inject()


def record_of_exercise(folder: Path) -> AccessLog:
    """Meet every wait of the engine, and return what was read and written meanwhile."""
    with recording() as log:
        for exercise, extra in ((stream_and_interrupt, 0), (promote_and_forget, 8)):
            bench = Bench(folder, shape_of(4), host=0, extra=extra, step=4)
            try:
                exercise(bench)
            except (AssertionError, OSError):
                # Without a wait anything may happen, and much of it is noticed. Not so with all.
                if ThreadMover.wait is _WAIT:
                    raise
            finally:
                bench.mover.close()
                bench.homes.close()
    return log


_WAIT = ThreadMover.wait
WAITS_OF_THE_THREADS = (
    Guard.READ_AFTER_LOAD,
    Guard.READ_AFTER_JOIN,
    Guard.READ_AFTER_PROMOTION,
    Guard.REUSE_AFTER_STORE,
    Guard.REUSE_AFTER_CANCEL,
    Guard.FREE_AFTER_MOVES,
)


def test_with_every_wait_the_exercise_has_no_race(tmp_path: Path) -> None:
    assert not races(record_of_exercise(tmp_path).events)


@pytest.mark.parametrize("guard", WAITS_OF_THE_THREADS, ids=lambda guard: guard.name)
def test_a_missing_wait_is_found(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadMover, "wait", without(guard))
    assert races(record_of_exercise(tmp_path).events)


@pytest.mark.parametrize("guard", [Guard.STORE_AFTER_WRITE, Guard.LOAD_AFTER_READ])
def test_what_submitting_orders_is_needed(guard: Guard, tmp_path: Path) -> None:
    """The queue's lock orders it, and cannot be left out: so it is struck from the record."""
    direction = Direction.DOWN if guard is Guard.STORE_AFTER_WRITE else Direction.UP

    def orders(event: Any) -> bool:
        return (
            isinstance(event, Release)
            and isinstance(event.token, tuple)
            and event.token[0] == "begin"
            and event.token[1].direction is direction
        )

    events = record_of_exercise(tmp_path).events
    assert any(map(orders, events))
    assert races([event for event in events if not orders(event)])


def test_every_guard_is_tested() -> None:
    by_submitting = {Guard.STORE_AFTER_WRITE, Guard.LOAD_AFTER_READ}
    of_pinned_buffers = {Guard.FILL_AFTER_COPY, Guard.WRITE_AFTER_COPY}  # test_stream_mover.py
    assert set(Guard) == {*WAITS_OF_THE_THREADS, *by_submitting, *of_pinned_buffers}
