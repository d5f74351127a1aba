"""The page of errors: its programs raise what it says, and messages begin as its headings do."""

import re
from typing import Any, NamedTuple

import jax
import pytest

from tests.support.pages import ROOT, Block, blocks, default_settings

PAGE = ROOT / "docs" / "errors.md"


class Entry(NamedTuple):
    """An error of the page."""

    name: str  # of the exception
    beginning: str  # of the message, with … for what differs
    program: Block


def entries() -> list[Entry]:
    """Every heading, with the block below it."""
    text = PAGE.read_text()
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    _, *programs = python()
    assert len(sections) == len(programs)
    headings = [section.splitlines()[0].strip("`").split(": ", 1) for section in sections]
    return [Entry(name, beginning, program) for (name, beginning), program in zip(headings, programs, strict=True)]


def python(language: str = "python") -> list[Block]:
    return [block for block in blocks(PAGE) if block.language == language]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.beginning[:40])
def test_error(entry):
    names = {"__name__": "errors"}
    with default_settings():
        next(iter(blocks(PAGE))).run(PAGE, names)  # what all programs begin with
        with pytest.raises(Exception) as raised:  # noqa: PT011, the page says which
            entry.program.run(PAGE, names)
    assert raised.type.__name__ == entry.name
    beginning = re.escape(entry.beginning).replace("…", ".*?")
    assert re.search(rf"(^|Error: ){beginning}", str(raised.value))


def test_what_an_error_looks_like_under_jit():
    """Line by line, but for the place."""
    (program,) = python("py")
    names: dict[str, Any] = {"__name__": "errors"}
    with default_settings():
        python()[0].run(PAGE, names)
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as raised:
            program.run(PAGE, names)
    assert program.output is not None
    line = program.line + 2
    shown = program.output.replace('/home/me/solver.py", line 31', f'{PAGE}", line {line}')
    shown = shown.replace("solver.py:31", f"docs/errors.md:{line}")
    assert str(raised.value).splitlines() == shown.splitlines()
