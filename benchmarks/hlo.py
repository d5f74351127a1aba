"""Write the optimised HLO of all programs that are measured, to be compared before and after a change of the code.

    python -m benchmarks.hlo FOLDER [part of a title]

Names of computations and instructions are numbered anew and metadata is left out. So two folders differ only where the
compiled programs do: `diff -rq BEFORE AFTER`. A change that only renames or moves code leaves them equal.
"""

import re
import sys
from pathlib import Path

import jax

from benchmarks import catalogue
from benchmarks.groups import Group, is_peer

METADATA = re.compile(r",? (metadata|frontend_attributes)=\{[^{}]*\}")
TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d.*\n)*\n*", re.MULTILINE)
NAME = re.compile(r"%[\w.\-]+")
PARAMETER = re.compile(r"[\w.\-]+: (?=\(|\w+\[)")  # in the first line of a computation


def normalised(hlo: str) -> str:
    """The text without metadata, with names numbered in the order in which they appear."""
    text = METADATA.sub("", TABLES.sub("", hlo))
    text = re.sub(r"^HloModule [^,]*", "HloModule program", text)
    text = "\n".join(PARAMETER.sub("", line) if line.endswith("{") else line for line in text.split("\n"))
    numbers: dict[str, str] = {}
    return NAME.sub(lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), text)


def main(folder: Path, part: str = "") -> None:
    """Compile each program and write its HLO; peers' programs are not loopax's code."""
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
