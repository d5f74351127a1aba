"""The pages of the documentation as blocks of code, each with the output that the page shows for it."""

import importlib.util
import io
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH = ROOT / "docs" / "with"  # pages about other libraries, whose programs `make clients` runs

# Pages show what the locked version of JAX gives. Another one may differentiate `tanh` by other equations, with
# residuals of other sizes: there, only the words of a program's output are compared.
ON_LOCKED_JAX = f"jax=={jax.__version__}\n" in (ROOT / "requirements.lock").read_text()

PACKAGES = {"PyTorch": "torch"}  # by the titles of blocks that need them

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


def python(page: Path) -> list[Block]:
    """What runs: all blocks of Python, but those of other packages where these are not installed."""
    found = [block for block in blocks(page) if block.language == "python"]
    missing = {title for title, module in PACKAGES.items() if importlib.util.find_spec(module) is None}
    return [block for block in found if block.title not in missing]


def run(page: Path) -> None:
    """One block after another, as somebody types them; each prints what the page shows."""
    names = {"__name__": page.stem}
    for block in python(page):
        printed = block.run(page, names)
        if block.output is not None:
            assert tokens(printed) == tokens(block.output), f"{page.name}, line {block.line}"


def tokens(text: str) -> list[Any]:
    """Words, and numbers to what is the same on all machines."""
    words = re.findall(r"[-+]?\d+\.\d*(?:e[-+]?\d+)?|\w+|[^\w\s]", text)
    return [token(word) for word in words if ON_LOCKED_JAX or not re.match(r"[-+]?\d|[KMG]?i?B$", word)]


def token(word: str) -> Any:
    """A word, or about a number."""
    return pytest.approx(float(word), rel=1e-3, abs=1e-6) if re.fullmatch(r"[-+]?\d+\..*", word) else word


if __name__ == "__main__":
    run(Path(sys.argv[1]))
