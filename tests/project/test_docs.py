"""The code of the README and of the pages runs as written, and prints or raises what they show."""

import ast
import re
import runpy
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax
import loopax.insight
import loopax.kinds
import loopax.schedule
from tests.support.example_files import precision_of_a_user
from tests.support.pages import PAGES, ROOT, WITH, Block, blocks, python, run

ERRORS = ROOT / "docs" / "errors.md"  # its programs raise, and have a test of their own

# Pages whose programs take long to compile, run by `make test-slow` and `make docs`.
LONG = {
    "events.md",
    "from-equinox.md",
    "from-pytorch.md",
    "histories.md",
    "simulations.md",
    "lanes.md",
    "many-devices.md",
    "models.md",
    "nested-loops.md",
    "rewrite.md",
    "trace-examples.md",
    "traces.md",
}


def with_programs() -> list[Any]:
    pages = [page for page in PAGES if python(page) and page != ERRORS and page.parent != WITH]
    assert {page.name for page in pages} >= LONG
    return [pytest.param(page, marks=pytest.mark.slow) if page.name in LONG else page for page in pages]


@pytest.mark.parametrize("page", with_programs(), ids=lambda p: p.name)
def test_page(page):
    """One after another, as somebody types them."""
    with precision_of_a_user():
        run(page)


def functions(page: Path, *chosen: str) -> dict[str, Any]:
    """Functions that a page defines, alone."""
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "lax": jax.lax, "lx": loopax}
    for block in reversed(python(page)):
        for node in ast.parse(block.code).body:
            if isinstance(node, ast.FunctionDef) and node.name in chosen:
                exec(ast.unparse(node), names)
    return names


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("README.md", "newton"),
        ("docs/start.md", "newton"),
        ("docs/from-lax.md", "root"),
        ("docs/from-pytorch.md", "root"),
        ("docs/lanes.md", "newton_root"),
    ],
)
def test_a_square_root_is_right_for_every_number_that_a_reader_writes(page: str, name: str):
    """In float32, and with both derivatives; the second of the last two numbers is beyond float32."""
    x = np.concatenate([np.arange(1, 1001), np.logspace(-18, 15, 331), [1e-30, 1e30]]).astype(np.float32)
    exact = x.astype(float)
    with precision_of_a_user():
        root = functions(ROOT / page, name, "far", "newton")[name]
        found = [np.asarray(jax.jit(jax.vmap(f))(x)) for f in (root, jax.grad(root), jax.hessian(root))]
    np.testing.assert_allclose(found[0], exact**0.5, rtol=1e-4)
    np.testing.assert_allclose(found[1], 0.5 * exact**-0.5, rtol=1e-3)
    np.testing.assert_allclose(found[2][:-2], -0.25 * exact[:-2] ** -1.5, rtol=1e-2)


def test_code_that_is_shown_but_not_run_is_python():
    """Blocks of `py` need several hosts (tests/hosts runs such programs)."""
    for page in PAGES:
        for block in blocks(page):
            assert block.language in {"python", "py", "bash", "text", "yaml"}, f"{page.name}: {block.language}"
            if block.language == "py":
                compile(block.code, page.name, "exec")


def test_commands_are_there():
    """Targets of make, scripts and extras that the pages name."""
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"
        for script in re.findall(r"python ((?:examples|benchmarks|docs)/\S+?\.py)", text):
            assert (ROOT / script).exists(), f"{page.name}: {script}"
        for names in re.findall(r"pip install \"?(?:loopax|\.)\[([\w,]+)\]", text):
            assert set(names.split(",")) <= extras.keys(), f"{page.name}: {names}"


def test_links_between_pages():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_public_name_is_in_the_reference_once():
    overview = runpy.run_path(str(ROOT / "docs" / "api_overview.py"))
    shown = [name for page in overview["pages"]() for name in overview["names"](page)]
    assert {f"{page}.md" for page in overview["pages"]()} | {"index.md"} == {
        page.name for page in (ROOT / "docs" / "api").iterdir()
    }
    names = {
        f"{module.__name__}.{name}"
        for module in (loopax, loopax.durable, loopax.insight, loopax.kinds, loopax.schedule, loopax.stochtrace)
        for name in module.__all__
        if not isinstance(getattr(module, name), ModuleType)
    }
    assert sorted(shown) == sorted(names - {"loopax.insight.Comparison"})  # it is loopax.Comparison
    assert overview["OVERVIEW"].read_text() == overview["overview"](), "run `make map`"


def test_every_page_is_in_the_navigation_once():
    """Of the site; `nav` stands at the left edge of mkdocs.yml, elsewhere it is ignored."""
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    listed = re.findall(r"([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:])


# ---- the page of errors: its programs raise what it says, and messages begin as its headings do

BEFORE, *PROGRAMS = python(ERRORS)  # what all programs begin with, and one below each heading
HEADINGS = re.findall(r"^### `+(\w+): (.*?)`+$", ERRORS.read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "beginning", "program"),
    [(*heading, program) for heading, program in zip(HEADINGS, PROGRAMS, strict=True)],
    ids=[beginning[:40] for _, beginning in HEADINGS],
)
def test_error(name: str, beginning: str, program: Block):
    """The class of an exception, and the beginning of its message, with … for what differs."""
    names = {"__name__": "errors"}
    with precision_of_a_user():
        BEFORE.run(ERRORS, names)
        with pytest.raises(Exception) as raised:  # noqa: PT011, the page says which
            program.run(ERRORS, names)
    assert raised.type.__name__ == name
    assert re.search(rf"(^|Error: ){re.escape(beginning).replace('…', '.*?')}", str(raised.value))


def test_what_an_error_looks_like_under_jit():
    """Line by line, but for the place."""
    (program,) = [block for block in blocks(ERRORS) if block.language == "py"]
    names: dict[str, Any] = {"__name__": "errors"}
    with precision_of_a_user():
        BEFORE.run(ERRORS, names)
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as raised:
            program.run(ERRORS, names)
    assert program.output is not None
    line = program.line + 2
    shown = program.output.replace('/home/me/solver.py", line 31', f'{ERRORS}", line {line}')
    shown = shown.replace("solver.py:31", f"docs/errors.md:{line}")
    assert str(raised.value).splitlines() == shown.splitlines()
