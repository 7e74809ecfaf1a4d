"""Bookkeeping of blocks, rows and moves: numpy only, no torch, no threads, no files."""
