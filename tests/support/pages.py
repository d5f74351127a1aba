"""The pages of the documentation as blocks of code, each with the output that the page shows for it."""

import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^(?P=indent)```\n',
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block."""

    language: str
    title: str | None
    code: str
    line: int  # of the page, before its first
    output: str | None  # the text block right behind it

    def run(self, page: Path, names: dict[str, Any]) -> str:
        """Execute it in the names of the blocks before it; what it prints."""
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("\n" * self.line + self.code, str(page), "exec"), names)
        return printed.getvalue()


def blocks(page: Path) -> Iterator[Block]:
    """All of them, in their order."""
    text = page.read_text()
    found = list(FENCE.finditer(text))
    for this, following in zip_longest(found, found[1:]):
        is_output = following is not None and following["language"] == "text" and _touch(text, this, following)
        output = following["code"] if following is not None and is_output else None
        line = text.count("\n", 0, this.start("code"))
        yield Block(this["language"], this["title"], textwrap.dedent(this["code"]), line, output)


def _touch(text: str, this: re.Match[str], following: re.Match[str]) -> bool:
    return not text[this.end() : following.start()].strip()


@contextmanager
def default_settings() -> Iterator[None]:
    """Those of JAX, which somebody who types the code has."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
