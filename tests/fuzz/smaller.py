"""A smaller program that is wrong in the same way: `python -m tests.fuzz.smaller NUMBER`."""

import sys
from collections.abc import Iterator
from dataclasses import replace

from tests.fuzz.draw import program
from tests.fuzz.evaluate import problem
from tests.fuzz.program import Program

SIMPLEST = {"rewritten": False, "policy": "", "lanes": "lockstep", "kind": "auto", "max_steps": None, "stop": False}
SIMPLEST |= {"reverse": False, "unroll": 1, "steps": 3, "loop": "scan"}


def smaller(program: Program) -> Program:
    """Leave out and simplify one thing after another, as long as the problem begins with the same words."""
    wrong = (problem(program) or "")[:13]
    if not wrong:
        raise SystemExit("nothing is wrong with this program")
    candidates = _simpler(program)
    for candidate in candidates:
        if (problem(candidate) or "").startswith(wrong):
            print(candidate, flush=True)
            return smaller(candidate)
    return program


def _simpler(program: Program) -> Iterator[Program]:
    for name in ("transformations", "body", "features"):
        all_of_them = getattr(program, name)
        for i in range(len(all_of_them)):
            if name != "body" or len(all_of_them) > 1:
                yield replace(program, **{name: all_of_them[:i] + all_of_them[i + 1 :]})
    for name, value in SIMPLEST.items():
        if getattr(program, name) != value:
            yield replace(program, **{name: value})


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 - its settings

    print(problem(smaller(program(int(sys.argv[1])))))
