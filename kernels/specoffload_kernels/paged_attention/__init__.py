"""Attention of a few query tokens over KV blocks held in arena slots."""
