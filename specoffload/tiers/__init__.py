"""Storage of blocks, and the threads that move them. Torch from here down; no transformers."""
