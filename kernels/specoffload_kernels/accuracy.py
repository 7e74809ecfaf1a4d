"""The accuracy that every path is held to, in one table."""

from __future__ import annotations

import torch

ACCURACY = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest absolute error against the float64 definition, by the type of queries and arena, on data
of unit scale. Sums are float32 in every path; the 16-bit entries allow for paths that round the
attention of a part to the input's type."""
