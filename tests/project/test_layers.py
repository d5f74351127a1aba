"""The structure of the package: imports only point down, and `__all__` is complete."""

import importlib
import re
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest

import loopax
from loopax._src import public
from tests.support.rooms import FILES, SOURCE, imported, imports_of_rooms

INTERNALS = SOURCE / "jax_internals"
FOLDERS = sorted(
    {file.parent.relative_to(SOURCE).as_posix() for file in FILES} - {".", "core", "core/batching/compact"}
)


def permitted(folder: str) -> set[str]:
    """What the folder's own docstring says that it may import."""
    docstring = importlib.import_module(f"loopax._src.{folder.replace('/', '.')}").__doc__ or ""
    named = re.search(r"May import: (.*)\.", docstring, re.DOTALL)
    assert named, f"{folder}/__init__.py does not say what it may import"
    return set() if named[1] == "nothing of loopax" else set(re.split(r",\s+", named[1]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_what_it_says(folder: str) -> None:
    assert imports_of_rooms()[folder] == permitted(folder)


def test_no_folder_is_above_and_below_another() -> None:
    assert list(TopologicalSorter(imports_of_rooms()).static_order())  # raises where there is a cycle


def test_no_file_is_above_and_below_another() -> None:
    files = {file: set(imported(file)) for file in FILES}
    assert list(TopologicalSorter(files).static_order())


def test_code_stands_below_what_is_public() -> None:
    public_names = re.compile(r"^(from loopax|import loopax)(?!\._src|\._version)", re.MULTILINE)
    allowed = {"public.py", *(f"command/{file.name}" for file in (SOURCE / "command").iterdir())}
    assert [
        name
        for file in FILES
        if (name := file.relative_to(SOURCE).as_posix()) not in allowed and public_names.search(file.read_text())
    ] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_private_jax_stands_in_one_folder(file: Path) -> None:
    assert "jax._src" not in file.read_text() or file.parent == INTERNALS


def test_all_is_complete() -> None:
    names = {name for name, value in vars(public).items() if not name.startswith("_") and not _is_module(value)}
    assert names == set(loopax.__all__)
    assert {*names, "durable", "stochtrace"} <= set(dir(loopax))
    assert all(getattr(loopax, name) is getattr(public, name) for name in names)
    assert list(loopax.__all__) == sorted(loopax.__all__)


def _is_module(value: object) -> bool:
    return isinstance(value, ModuleType)


def test_everything_public_says_where_it_lives() -> None:
    for name in loopax.__all__:
        assert getattr(loopax, name).__doc__
