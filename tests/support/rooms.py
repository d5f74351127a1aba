"""The rooms of the house: the folders of `loopax/_src`, the files beside them, and what they import."""

import ast
import functools as ft
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "loopax" / "_src"
FILES = sorted(SOURCE.rglob("*.py"))


def imported(file: Path) -> Iterator[Path]:
    """The files, or packages, of `_src` that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loopax._src"):
            package = SOURCE.joinpath(*(node.module or "").split(".")[2:])
            for alias in node.names:
                inner = package / alias.name
                yield next(
                    path
                    for path in (inner.with_suffix(".py"), inner / "__init__.py", package.with_suffix(".py"), package)
                    if path.exists()
                )


def room(path: Path) -> str:
    """The folder that a file belongs to, of core the folder inside; a file beside the folders is a room of its own.

    So are those in core, but for the table of all rules, which is a part of core itself.
    """
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts[0] == "core" and parts[1:] not in ((), ("__init__",), ("rules",)):
        return "/".join(parts[:2])
    return parts[0]


@ft.cache
def imports_of_rooms() -> dict[str, set[str]]:
    """What each room imports of the others."""
    found: dict[str, set[str]] = {
        room(file): set() for file in FILES if file.parent != SOURCE or file.stem != "__init__"
    }
    for file in FILES:
        if file != SOURCE / "__init__.py":
            found[room(file)] |= {room(other) for other in imported(file)} - {room(file)}
    return found
