"""The frontier of a row, against a plain list of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from specoffload.core.ledger import Ledger

NUM_ROWS = 3
rows = st.integers(0, NUM_ROWS - 1)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(NUM_ROWS)
        self.committed = [[] for _ in range(NUM_ROWS)]
        self.drafted = [[] for _ in range(NUM_ROWS)]

    @rule(row=rows, count=st.integers(0, 5))
    def advance(self, row: int, count: int) -> None:
        self.ledger.advance(np.array([row]), np.array([count]))
        self.drafted[row] += ["t"] * count

    @rule(row=rows, data=st.data())
    def commit(self, row: int, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.drafted[row])))
        self.ledger.commit(row, count)
        self.committed[row] += self.drafted[row][:count]
        del self.drafted[row][:count]

    @rule(row=rows)
    def commit_too_many(self, row: int) -> None:
        with pytest.raises(ValueError, match="provisional"):
            self.ledger.commit(row, len(self.drafted[row]) + 1)

    @rule(row=rows)
    def rollback(self, row: int) -> None:
        assert self.ledger.rollback(row) == len(self.drafted[row])
        self.drafted[row] = []

    @rule(row=rows)
    def reset(self, row: int) -> None:
        self.ledger.reset(row)
        self.committed[row], self.drafted[row] = [], []

    @invariant()
    def counts_agree(self) -> None:
        committed = [len(tokens) for tokens in self.committed]
        drafted = [len(tokens) for tokens in self.drafted]
        assert self.ledger.committed.tolist() == committed
        assert self.ledger.frontier.tolist() == [
            c + d for c, d in zip(committed, drafted, strict=True)
        ]


TestLedger = LedgerMachine.TestCase


def test_negative_advance_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Ledger(1).advance(np.array([0]), np.array([-1]))


def test_looking_does_not_touch() -> None:
    ledger = Ledger(1)
    ledger.committed[0] = 7
    assert ledger.committed.tolist() == [0]
