"""Scores of blocks from the summaries of their keys."""
