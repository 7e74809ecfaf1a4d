"""Names of things that are counted, so that a slot is never taken for a block."""

from __future__ import annotations

from typing import NewType

RowId = NewType("RowId", int)
"""A sequence being decoded."""

LayerId = NewType("LayerId", int)
"""A layer of the pair: the target's layers first, then the draft's."""

BlockId = NewType("BlockId", int)
"""Position of a block in its sequence: it holds tokens `[block * block_size, ...)`."""

SlotId = NewType("SlotId", int)
"""A place for one block in an arena; -1 where there is none."""

ExtentId = NewType("ExtentId", int)
"""A place for one block in the spill file; -1 where there is none."""
