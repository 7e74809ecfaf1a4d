"""The text of the demo pair's distillation: files by kind, and questions nobody trains on.

Knows where text lies, how it is cleaned, and which of it is held out. Refuses to know any model.
"""

import gzip
import html
import random
import re
import sysconfig
import zlib
from pathlib import Path

from transformers import PreTrainedTokenizerBase

TEXT = (
    "prose=/usr/share/doc/anarchism/html",
    "documentation=/usr/share/doc/python3.11/html",
    "documentation=/usr/share/developers-reference",
    "documentation=/usr/share/debian-reference",
    "documentation=/usr/share/doc/git",
    "documentation=/usr/share/doc/sqlite3",
    f"code={sysconfig.get_path('stdlib')}",
)
KINDS = ("prose", "documentation", "code")
SUFFIXES = {".py", ".txt", ".md", ".rst", ".html", ".gz"}
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "encodings",
}

# Held-out prompts. The target starts its own training dialogues from nothing but an opener.
QUESTIONS = {
    "chat": (
        "What causes the seasons on Earth?",
        "Write a short letter to a neighbour about a lost cat.",
        "How should I prepare for a job interview at a bakery?",
        "Explain the difference between weather and climate.",
        "Give me three tips to sleep better.",
        "Who was Marie Curie, and why is she remembered?",
        "Tell me a short story about a lighthouse keeper.",
        "What are the advantages of public libraries?",
        "How do vaccines work?",
        "Plan a weekend in a small town by the sea.",
    ),
    "chat about code": (
        "Write a Python function that checks whether a word is a palindrome.",
        "How do I read a CSV file in Python without any library?",
        "Explain what a decorator is in Python, with an example.",
        "Write a Python class for a bank account with deposit and withdraw.",
        "What is the difference between a list and a tuple in Python?",
        "Write a function that returns the n-th Fibonacci number.",
        "How can I count the words in a text file with Python?",
        "Write a SQL query that finds the five most expensive products.",
        "Explain recursion to a beginner and show some code.",
        "Write a Python script that renames all files in a folder.",
    ),
}


def read(path: Path) -> str:
    """The text of a file, without mark-up and runs of blank lines."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    text = raw.decode("utf-8", errors="ignore")
    if ".html" in path.suffixes:
        text = re.sub(r"(?s)<(script|style|head|nav)\b.*?</\1>|<!--.*?-->", "", text)
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
    return re.sub(r"[ \t]*\n(\s*\n)+", "\n\n", text)


class Corpus:
    """Files by kind; the hash of a file's path says whether it is held out (one in ten is)."""

    def __init__(self, specs: list[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.files: dict[tuple[str, bool], list[Path]] = {}
        for spec in specs:
            kind, _, root = spec.partition("=")
            if kind not in KINDS:
                raise SystemExit(f"--text {spec}: the kind must be one of {', '.join(KINDS)}")
            below = Path(root).rglob("*") if Path(root).is_dir() else [Path(root)]
            for path in sorted(below):
                wanted = path.suffix in SUFFIXES and (kind != "code" or path.suffix == ".py")
                if wanted and path.is_file() and not SKIPPED_FOLDERS & set(path.parts):
                    name = path.relative_to(root).as_posix()
                    held_out = zlib.crc32(name.encode()) % 10 == 0
                    self.files.setdefault((kind, held_out), []).append(path)
        for kind in KINDS:
            counts = [len(self.files.get((kind, held_out), ())) for held_out in (False, True)]
            print(f"{kind}: {counts[0]} files to learn from, {counts[1]} held out")
            if not all(counts):
                raise SystemExit(f"no text of kind {kind}: see --text, and the packages in --help")

    def draw(self, kind: str, num_tokens: int, rng: random.Random, *, held_out: bool) -> list[int]:
        """Tokens from a random line on of a random file in which enough follow."""
        while True:
            text = read(rng.choice(self.files[kind, held_out]))
            start = text.find("\n", rng.randrange(len(text) + 1)) + 1
            chars = text[start : start + 12 * num_tokens]
            tokens = self.tokenizer.encode(chars, add_special_tokens=False, verbose=False)
            if len(tokens) >= num_tokens:
                return list(tokens[:num_tokens])
