"""Unpacking of a contiguous run into scattered arena slots."""
