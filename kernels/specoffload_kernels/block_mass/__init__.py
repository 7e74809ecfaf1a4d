"""Softmax mass of every block, from per-block log-sum-exps."""
