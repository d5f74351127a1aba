"""Which share of the programs has what: `python -m tests.fuzz 5000`."""

import sys
from collections.abc import Callable

from tests.fuzz.catalogue import OPERATIONS, WITH_CHECKPOINTS
from tests.fuzz.draw import LARGE, program
from tests.fuzz.program import Program
from tests.fuzz.transformations import BATCHES, DERIVATIVES, REVERSE

SHARES: dict[str, Callable[[Program], object]] = {
    "more than 4 operations": lambda p: len(p.body) > LARGE,
    "a derivative": lambda p: DERIVATIVES & {*p.transformations},
    "reverse mode": lambda p: REVERSE & {*p.transformations},
    "a batch": lambda p: BATCHES & {*p.transformations},
    "a batch and a derivative": lambda p: BATCHES & {*p.transformations} and DERIVATIVES & {*p.transformations},
    "counted calls": lambda p: {*p.features} & {*"eio"},
    "keys of rbg": lambda p: "g" in p.features or ("y" in p.features and p.seed % 3 < 2),
    "jax.checkpoint": lambda p: p.policy or {*WITH_CHECKPOINTS, "checkpoint"} & {*p.body, *p.transformations},
    "a policy around the step": lambda p: p.policy,
    "rows in host memory": lambda p: "p" in p.features,
    "rows of 64 bits in 32-bit mode": lambda p: "d" in p.features,
    "rewrite_loops": lambda p: p.rewritten,
    "choices by constants": lambda p: any("chosen" in name or "constant" in name for name in p.body),
    "flags of loops": lambda p: any("flag_" in name for name in p.body),
}


def main(programs: int) -> None:
    """Print the table."""
    drawn = list(map(program, range(programs)))
    for name, has in SHARES.items():
        print(f"{name:32} {100 * sum(bool(has(one)) for one in drawn) / programs:3.0f} %")
    never = {*OPERATIONS} - {name for one in drawn for name in one.body}
    print("operations that are never drawn:", *never or ["none"])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5000)
