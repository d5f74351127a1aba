"""Write the optimised HLO of all programs that are measured, to be compared before and after a change of the code.

    python -m benchmarks.hlo FOLDER [part of a title]

A computation is written as the tree of its root: each instruction behind its operands, in the order in which these are
first needed. Names of computations and instructions are numbered anew, and metadata is left out. So two folders differ
only where the compiled programs do: `diff -rq BEFORE AFTER`. A change that renames or moves code leaves them equal, and
so does one of the order of instructions that do not need each other.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from benchmarks.groups import Group, is_peer

METADATA = re.compile(r",? (metadata|frontend_attributes)=\{[^{}]*\}")
TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d.*\n)*\n*", re.MULTILINE)
NAME = re.compile(r"%[\w.\-]+")
PARAMETER = re.compile(r"[\w.\-]+: (?=\(|\w+\[)")  # in the first line of a computation


def normalised(hlo: str) -> str:
    """The text without metadata, each computation as the tree of its root, with names numbered as they appear."""
    text = METADATA.sub("", TABLES.sub("", hlo))
    text = re.sub(r"^HloModule [^,]*", "HloModule program", text)
    text = "\n".join(PARAMETER.sub("", line) if line.endswith("{") else line for line in text.split("\n"))
    head, *blocks = re.split(r"^(?=(?:ENTRY )?%[\w.\-]+ .*\{$)", text, flags=re.MULTILINE)
    computations = {NAME.search(block)[0]: block.rstrip() for block in blocks}  # type: ignore[index]
    entries = [name for name, block in computations.items() if block.startswith("ENTRY")]
    text = head + "\n\n".join(_reached(computations, entries, as_tree))
    numbers: dict[str, str] = {}
    return NAME.sub(lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), text) + "\n"


def as_tree(block: str) -> str:
    """A computation whose instructions stand behind their operands, from the root on; then those with effects alone."""
    first, *lines = block.split("\n")
    instructions = {NAME.search(line)[0]: line for line in lines if " = " in line}  # type: ignore[index]
    root = [name for name, line in instructions.items() if line.lstrip().startswith("ROOT")]
    return "\n".join([first, *_reached(instructions, [*root, *instructions]), "}"])


def _reached(texts: dict[str, str], names: Sequence[str], write: Callable[[str], str] = str) -> list[str]:
    """The texts of these names, each behind those of the names in it."""
    found: dict[str, str] = {}
    left = [(name, False) for name in reversed(names)]
    while left:
        name, is_ready = left.pop()
        if name in found or name not in texts:
            continue
        if is_ready:
            found[name] = write(texts[name])
            continue
        inside = [other for other in NAME.findall(write(texts[name])) if other != name]
        left += [(name, True), *((other, False) for other in reversed(inside))]
    return list(found.values())


def main(folder: Path, part: str = "") -> None:
    """Compile each program and write its HLO; peers' programs are not loopax's code."""
    from benchmarks import catalogue  # it needs the packages of all peers

    folder.mkdir(parents=True, exist_ok=True)
    for item in catalogue.chosen(part):
        if not isinstance(item, Group):
            continue
        for case in item.cases:
            if is_peer(case.name):
                continue
            jax.clear_caches()
            compiled = jax.jit(case.function).lower(*case.arguments).compile()
            name = re.sub(r"\W+", "_", f"{item.title} {case.name}")
            (folder / f"{name}.txt").write_text(normalised(compiled.as_text() or ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
