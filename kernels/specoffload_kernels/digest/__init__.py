"""Summaries of the keys of blocks."""
