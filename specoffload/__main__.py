"""`python -m specoffload`."""

from __future__ import annotations

import sys

from specoffload.cli import main

if __name__ == "__main__":
    sys.exit(main())
