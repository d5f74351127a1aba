"""The page on the code says what is so: the map is that of the imports, the walk a profiler's."""

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import pytest
from jax._src import core
from jax._src.interpreters import ad, batching, mlir, partial_eval, remat
from jax._src.state import discharge

from loopax._src.core.autodiff.sweep_transpose import linear_sweep_p
from loopax._src.core.batching.compact_primitive import compact_vmap_p
from loopax._src.core.ir.linear_loop import linear_loop_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.ir.reverse_sweep import reverse_sweep_p
from loopax._src.core.jaxpr.types import retyped_p
from loopax._src.core.lane_effects import only_if_p
from loopax._src.core.masking import active_p, fill_inactive_p, walk_row_p
from loopax._src.core.row_buffers import VERSION
from loopax._src.jax_internals import keep_bits_p
from tests.support.example_files import precision_of_a_user
from tests.support.pages import PAGES, ROOT, blocks
from tests.support.rooms import FILES, SOURCE

PAGE = ROOT / "docs" / "how-it-works.md"

# What the walk leaves out, as the page says.
HELPERS = re.compile(r"core/jaxpr/|settings|pytrees/|jax_internals|frontend/export_check")


def test_the_map_and_the_table_of_rooms_are_up_to_date() -> None:
    house_map = runpy.run_path(str(ROOT / "docs" / "house_map.py"))
    picture = house_map["PICTURE"].read_text()
    assert picture == house_map["picture"](), "run `make map`"
    assert house_map["table"]() in PAGE.read_text(), "run `make map`"
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
    with precision_of_a_user():
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


GROUPS = [[loop_p, reverse_sweep_p], [compact_vmap_p], [linear_loop_p, linear_sweep_p]]
GROUPS.append([*VERSION, fill_inactive_p, retyped_p, keep_bits_p])
_DERIVATIVES = {"primitive_jvps", "primitive_linearizations", "primitive_transposes"}
WITHOUT_DERIVATIVES = {active_p: _DERIVATIVES, walk_row_p: _DERIVATIVES, only_if_p: {"primitive_transposes"}}

REGISTERED: dict[str, Any] = {
    "`primitive_jvps`": ad.primitive_jvps.__contains__,
    "`primitive_linearizations`": ad.primitive_linearizations.__contains__,
    "`primitive_transposes`": ad.primitive_transposes.__contains__,
    "`fancy_transposes`": ad.fancy_transposes.__contains__,
    "`custom_partial_eval_rules`": partial_eval.custom_partial_eval_rules.__contains__,
    "`partial_eval_jaxpr_custom_rules`": partial_eval.partial_eval_jaxpr_custom_rules.__contains__,
    "`remat.rules`": remat.rules.__contains__,
    "`dce_rules`": partial_eval.dce_rules.__contains__,
    "lowering": mlir._lowerings.__contains__,
    "batching": lambda p: p in batching.fancy_primitive_batchers or p in batching.primitive_batchers,
    "`custom_typechecks`": core.custom_typechecks.__contains__,
    "discharge rule": discharge._discharge_rules.__contains__,
    "`to_lojax`": lambda p: "to_lojax" in vars(p),
}


def rows() -> dict[str, list[str]]:
    lines = PAGE.read_text().partition("| JAX's name |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def test_the_table_has_all_rules() -> None:
    assert list(rows()) == list(REGISTERED)


@pytest.mark.parametrize("name", REGISTERED)
def test_what_is_registered(name: str) -> None:
    cells = rows()[name]
    for said, primitives in zip(cells, GROUPS, strict=True):
        assert {REGISTERED[name](p) for p in primitives} == {said == "yes"}
    reasons = PAGE.read_text().partition("\nWhy not:\n")[2].partition("\n\n`active_lanes`")[0]
    assert ("no" in cells) == (f"\n- {name}: " in reasons)


def test_the_two_without_some_derivatives() -> None:
    for primitive, missing in WITHOUT_DERIVATIVES.items():
        for name in ("primitive_jvps", "primitive_linearizations", "primitive_transposes"):
            assert REGISTERED[f"`{name}`"](primitive) == (name not in missing)
