"""The pages of the documentation as blocks of code, each with the output that the page shows for it."""

import io
import re
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

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
        is_right_behind = following is not None and not text[this.end() : following.start()].strip()
        output = following["code"] if following and is_right_behind and following["language"] == "text" else None
        line = text.count("\n", 0, this.start("code"))
        yield Block(this["language"], this["title"], textwrap.dedent(this["code"]), line, output)
