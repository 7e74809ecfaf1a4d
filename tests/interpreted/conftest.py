"""These tests need Triton's interpreter, which a process must ask for before it imports Triton.

`tests/cpu/test_triton_interpreted.py` runs them in a process of their own.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
