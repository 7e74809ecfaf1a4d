"""Real long prompts out of text that ships with Python itself, cut to an exact length.

Knows where such text lies and how to put it before an instruct model. Refuses to know which model
that is, beyond its tokenizer, and what the prompt is used for.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterator
from itertools import chain, cycle
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from specoffload.errors import SpecOffloadError

PromptKind = Literal["docs", "code", "chat", "lookup"]


def demo_prompt(
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    *,
    kind: PromptKind = "docs",
    variant: int = 0,
) -> torch.Tensor:
    """A real prompt `[1, num_tokens]`, exactly that long.

    The same arguments give the same prompt on the same Python version. With a chat template, text
    and question are one user message; without, they are joined plainly.

    Args:
        tokenizer: the target's.
        num_tokens: length of the whole prompt, template and question included.
        kind: ``docs``, the language reference, to be summarised; ``code``, library modules, to be
            explained; ``chat``, questions and answers, then one more question; ``lookup``, a list
            of functions with what they do, the first of which is asked for.
        variant: another prompt of the same kind.

    Raises:
        SpecOffloadError: an unknown `kind`, or too few tokens for template, question and some text.
    """
    if kind not in _SOURCES:
        raise SpecOffloadError(f"unknown kind {kind!r}: choose one of {', '.join(_SOURCES)}")
    opening, question = _FRAMES[kind]
    texts = _SOURCES[kind](variant)
    if kind == "lookup":
        asked = next(texts)
        texts = chain([asked], texts)
        question = question.format(name=asked.split(":")[0].removeprefix("- "))
    before, after = _render(tokenizer, opening, question)
    head, tail = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
    room = num_tokens - len(head) - len(tail)
    if room < 1:
        raise SpecOffloadError(
            f"num_tokens={num_tokens} leaves no room for text: a {kind!r} prompt needs at least "
            f"{len(head) + len(tail) + 1}"
        )
    body: list[int] = []
    for text in texts:
        body += tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if len(body) >= room:
            break
    return torch.tensor([head + body[:room] + tail])


def _render(tokenizer: PreTrainedTokenizerBase, opening: str, question: str) -> tuple[str, str]:
    """The prompt's text before and after the document."""
    mark = "\x00"
    content = f"{opening}{mark}{question}"
    if tokenizer.chat_template is not None:
        message = [{"role": "user", "content": content}]
        content = str(
            tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        )
    before, after = content.split(mark)
    return before, after


def _topics(variant: int, *, max_chars: int | None = None) -> Iterator[str]:
    from pydoc_data.topics import topics

    names = [name for name in sorted(topics) if not max_chars or len(topics[name]) <= max_chars]
    names.sort(key=lambda name: -len(topics[name]))
    return cycle(topics[name].strip() + "\n\n" for name in _rotated(names, variant))


def _modules(variant: int) -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    names = ["argparse", "dataclasses", "heapq", "textwrap", "functools", "statistics", "zipfile"]
    for name in cycle(_rotated(names, variant)):
        source = (library / f"{name}.py").read_text(encoding="utf-8")
        yield f"```python\n# {name}.py\n{source}```\n\n"


def _turns(variant: int) -> Iterator[str]:
    for topic in _topics(variant, max_chars=3000):
        title, _, rest = topic.partition("\n")
        yield f"Question: What does Python's reference say about {title.lower()}?\nAnswer: {rest}\n"


def _functions(variant: int) -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    names = ["os", "shutil", "statistics", "inspect", "random", "textwrap", "tempfile", "ast"]
    for name in cycle(_rotated(names, variant)):
        module = ast.parse((library / f"{name}.py").read_text(encoding="utf-8"))
        for node in module.body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            if summary and not summary.startswith(node.name):  # not a mere signature
                yield f"- {name}.{node.name}: {summary}\n"


def _rotated(names: list[str], variant: int) -> list[str]:
    start = variant % len(names)
    return names[start:] + names[:start]


_SOURCES: dict[PromptKind, Callable[[int], Iterator[str]]] = {
    "docs": _topics,
    "code": _modules,
    "chat": _turns,
    "lookup": _functions,
}
_FRAMES: dict[PromptKind, tuple[str, str]] = {
    "docs": ("Read this documentation.\n\n", "\n\nSummarize the documentation above."),
    "code": (
        "Here is some Python code.\n\n",
        "\n\nExplain what the code above does, step by step.",
    ),
    "chat": (
        "Here is our conversation so far.\n\n",
        "\n\nQuestion: Which of these answers should a beginner read first, and why?",
    ),
    "lookup": (
        "Here is a list of Python functions.\n\n",
        "\n\nWhat does {name} do? Quote its line.",
    ),
}
