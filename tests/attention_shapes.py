"""Calls that bring out what is particular to the Triton kernels of paged attention.

Small enough for Triton's interpreter.
"""

from __future__ import annotations

from kernel_cases import Shape

SHAPES = {
    "plain": Shape(),
    "one query": Shape(num_q=1),
    "multi-head": Shape(heads=3, groups=1, num_q=1, lengths=(70,)),
    "multi-query, D 128": Shape(heads=1, groups=8, head_dim=128, block_size=64, num_q=2),
    "group of 7, D 80": Shape(heads=1, groups=7, head_dim=80),
    "group of 9, D 256": Shape(heads=1, groups=9, head_dim=256, lengths=(70, 9)),
    "D 96": Shape(head_dim=96, num_q=3, heads=1),
    "D 112": Shape(head_dim=112, num_q=1, heads=1),
    "D 20": Shape(head_dim=20, heads=1),
    "D 8, blocks of 4": Shape(head_dim=8, block_size=4),
    "odd blocks": Shape(block_size=7, lengths=(50, 49, 7)),
    "blocks of 48": Shape(block_size=48, num_q=2),
    "blocks of 1": Shape(block_size=1, lengths=(12, 5, 9)),
    "blocks of 32": Shape(block_size=32, heads=1),
    "large blocks": Shape(block_size=256, lengths=(300, 256, 257), num_q=3, heads=1),
    "large odd blocks": Shape(block_size=200, lengths=(230,), num_q=3, heads=1),
    "17 queries": Shape(num_q=17, heads=1, lengths=(130, 77, 17)),
    "70 queries": Shape(num_q=70, heads=1, lengths=(130, 70)),
    "70 queries, absent, window": Shape(
        absent=((0, 1), (0, 6), (1, 2)), num_q=70, heads=1, lengths=(130, 77, 70), window=50
    ),
    "several splits": Shape(heads=1, lengths=(1100, 300), block_size=64),
    "several splits, window": Shape(heads=1, lengths=(1100, 900), block_size=64, window=400),
    "several splits, few blocks here": Shape(
        heads=1,
        lengths=(1100,),
        block_size=64,
        num_q=1,
        absent=tuple((0, block) for block in range(1, 18) if block not in (4, 5)),
    ),
    "window": Shape(window=20),
    "window of 1": Shape(window=1),
    "window below the queries": Shape(window=9, num_q=17, heads=1, lengths=(130, 77, 17)),
    "softcap": Shape(softcap=2.0),
    "softcap and window": Shape(softcap=30.0, window=33, groups=4, head_dim=128, heads=1),
    "absent blocks": Shape(absent=((0, 0), (0, 3), (1, 4), (2, 0))),
    "nothing here": Shape(absent=tuple((0, block) for block in range(3)), lengths=(40,)),
    "empty row": Shape(num_q=1, lengths=(0, 40)),
    "shorter than the queries": Shape(num_q=17, heads=1, lengths=(130, 3)),
}
SIXTEEN_BITS = ("plain", "one query", "odd blocks", "large blocks", "70 queries", "softcap")
"""Those that are tested with 16-bit types, too."""
