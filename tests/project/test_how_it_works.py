"""The page on the code says what is so: the map is that of the imports, and the walk that of a profiler."""

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import pytest

from tests.support.pages import PAGES, ROOT, blocks, default_settings
from tests.support.rooms import FILES, SOURCE

PAGE = ROOT / "docs" / "how-it-works.md"

# What the walk leaves out, as the page says.
HELPERS = re.compile(r"core/jaxpr/|pytrees/|jax_internals|frontend/export_check")


@pytest.fixture(scope="module")
def house_map() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "house_map.py"))


def test_the_map_is_up_to_date(house_map: dict[str, Any]) -> None:
    assert house_map["PICTURE"].read_text() == house_map["picture"](), "run `make map`"


def test_the_table_of_rooms_is_up_to_date(house_map: dict[str, Any]) -> None:
    assert house_map["table"]() in PAGE.read_text(), "run `make map`"


def test_every_room_is_on_the_map(house_map: dict[str, Any]) -> None:
    picture = house_map["PICTURE"].read_text()
    rooms = house_map["imports_of_rooms"]().keys() - {"public"}  # its names are those of `loopax`
    assert [room for room in rooms if room not in picture] == []


def walk() -> list[str]:
    """The files of the page's walk, in its order."""
    return re.findall(r"\*\*`([\w/]+\.py)`\*\*", PAGE.read_text())


@contextmanager
def files_called(found: dict[str, None]) -> Iterator[None]:
    """Collect the files of `_src` of which functions are called, in the order of their first calls."""
    files = {str(file): file.relative_to(SOURCE).as_posix() for file in FILES}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := files.get(frame.f_code.co_filename)):
            found.setdefault(name)

    before: Callable[..., Any] | None = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


def test_the_walk_passes_these_files_in_this_order() -> None:
    """The page's first program, whose last line is the walk."""
    program = next(block.code for block in blocks(PAGE) if block.language == "python")
    before, last = program.strip().rsplit("\n", 1)
    names: dict[str, Any] = {}
    found: dict[str, None] = {}
    with default_settings():
        exec(before, names)
        jax.block_until_ready(names["lx"].fori_loop(0, 1, lambda _, x: x, 0.0))  # imports are no part of it
        with files_called(found):
            exec(last, names)
    assert [file for file in found if not HELPERS.match(file)] == walk()


def test_files_that_pages_name_are_there() -> None:
    """Those in a folder, from the root of the repository or from `loopax/_src`."""
    for page in PAGES:
        for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|md|toml|yml))`", page.read_text()):
            assert (ROOT / name).exists() or (SOURCE / name).exists(), f"{page.name}: {name}"
