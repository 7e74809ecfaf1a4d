"""Functions that Triton's interpreter lacks."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl

_TWO_LOG2E = tl.constexpr(2.0 / math.log(2.0))


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent: by its series where the quotient of exponentials would cancel."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return tl.where(tl.abs(x) < 0.2, series, 1.0 - 2.0 / (tl.exp2(x * _TWO_LOG2E) + 1.0))
