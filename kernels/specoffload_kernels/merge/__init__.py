"""Log-sum-exp merge of attention over disjoint sets of blocks."""
