"""Check that what the documentation names exists: links, paths, commands and their options.

    python examples/check_docs.py

Prints every fault and exits with 1 if there is one.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from specoffload.cli import build_parser

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`([^`\n]+)`")
TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
FOLDERS = ("specoffload/", "kernels/", "fusion/", "tests/", "examples/", "docs/", "models/", ".ci/")


def main() -> int:
    targets = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    faults = [
        f"{page.relative_to(ROOT)}: {fault}" for page in pages for fault in _faults(page, targets)
    ]
    print("\n".join(faults) or f"{len(pages)} pages: all links, paths and commands exist")
    return 1 if faults else 0


def _faults(page: Path, targets: set[str]) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    prose = FENCE.sub("", text)
    for link in LINK.findall(prose):
        yield from _link_faults(page, link, prose)
    spans = CODE.findall(prose)
    for span in spans:
        path = span.split()[0]
        if path.startswith(FOLDERS) and not (ROOT / path).exists():
            yield f"`{path}` does not exist"
    for language, block in FENCE.findall(text):
        if language == "python":
            compile(block, str(page), "exec")
        elif not language:
            spans += [line.partition("#")[0].strip() for line in block.splitlines()]
    for command in spans:
        yield from _command_faults(command, targets)


def _link_faults(page: Path, link: str, prose: str) -> Iterator[str]:
    path, _, anchor = link.partition("#")
    if "://" in link:
        return
    if path and not (page.parent / path).exists():
        yield f"link to {link}, which does not exist"
    if not path and anchor not in {
        _anchor(title) for title in re.findall(r"^#+ (.*)", prose, re.M)
    }:
        yield f"link to #{anchor}, and no title is called that"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _command_faults(command: str, targets: set[str]) -> Iterator[str]:
    words = shlex.split(command, comments=True) if _is_command(command) else []
    if words[:1] == ["make"] and len(words) > 1 and words[1] not in targets:
        yield f"`{command}`: the Makefile has no {words[1]}"
    if words[:3] == ["python", "-m", "specoffload"]:
        complaint = io.StringIO()
        with contextlib.redirect_stderr(complaint):
            try:
                build_parser().parse_args(words[3:])
            except SystemExit:
                yield f"`{command}`: {complaint.getvalue().splitlines()[-1]}"
    if words[:1] == ["python"] and words[1].endswith(".py") and not (ROOT / words[1]).exists():
        yield f"`{command}`: there is no {words[1]}"


def _is_command(text: str) -> bool:
    return text.startswith(("make ", "python -m specoffload ", "python examples/"))


if __name__ == "__main__":
    sys.exit(main())
