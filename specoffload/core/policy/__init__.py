"""Which resident blocks to demote: one policy a file, each a pure function of the table."""
