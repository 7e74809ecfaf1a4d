"""The face towards transformers: how a model writes to our cache, and its attention reads it."""
