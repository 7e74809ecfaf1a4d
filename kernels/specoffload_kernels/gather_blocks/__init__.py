"""Packing of scattered arena slots into a contiguous run."""
