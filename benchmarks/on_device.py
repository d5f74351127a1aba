"""The tables of this benchmark that `python -m benchmarks --device` measures, and how: one in each process.

    python -m benchmarks.on_device --list    # titles and expected seconds, as JSON
    python -m benchmarks.on_device TITLE     # measure the table, and print a record

They are chosen for a GPU, where a step takes 10 to 50 microseconds for each operation that XLA does not fuse: loops of
at most some thousand steps, whose programs take less than a second. Left out are tables that count evaluations or
compare memory (they are the same everywhere), that need several devices or the disk, and all loops of 20 000 steps and
more. What loops of small bodies cost, unrolling, and asking the condition less often are measured by tables of the
package, with sizes for a device.
"""

import importlib
import json
import sys
from typing import Any

ROUNDS, ENOUGH_SECONDS = 5, 20.0
# Module, expected seconds, and title.
TABLES = [
    ("recurrences", 50, "Gradient: GRU 128, batch 32, n = 1000"),
    ("recurrences", 35, "Forward: GRU 128, batch 32, n = 1000"),
    ("budgets", 45, "Gradient with 10 and 20 checkpoints: GRU 128, batch 32, n = 1000"),
    ("budgets", 20, "Auto: Dense 512, batch 64, n = 200"),
    ("budgets", 20, "Auto: Attention, 64 x 64, n = 300"),
    ("budgets", 20, "Auto: Elementwise functions, 4096, n = 1000"),
    ("ragged", 70, "1024 lanes, log-normal counts: gradient of shared weights"),
    ("ways", 15, "Auto lanes: GRU 32, 64 lanes"),
    ("ways", 15, "Auto lanes: layer of 256, 32 lanes"),
    ("branches", 20, "Branches: 16 experts, 4096 tokens, width 256, balanced, forward"),
    ("histories", 45, "Histories and buffers: gradient, rows of 3 floats"),
    ("stochtrace", 20, "Traces: XTrace, forward, n = 1024, 64 products"),
]


def main(asked: str) -> None:
    """Print the list, or what is measured."""
    if asked == "--list":
        print(json.dumps([(title, seconds) for _, seconds, title in TABLES]))
        return
    (module,) = [module for module, _, title in TABLES if title == asked]
    print(json.dumps(measured(module, asked)))


def measured(module: str, title: str) -> dict[str, Any]:
    """Return the table as a record. The program of loopax for which the group has its first target is the first row."""
    from benchmarks.short.device_worker import record
    from benchmarks.short.measure import Contender, Program, measure

    (group,) = [group for group in importlib.import_module(f"benchmarks.{module}").groups() if group.title == title]
    cases = sorted(group.cases, key=lambda case: case.name != group.targets[0].of)  # the others stay in order
    contenders = [Contender(case.name, case.function, case.arguments) for case in cases]
    program = Program(title, contenders, steps=group.steps, is_one=False)
    return record(title, title, measure(program, ROUNDS, warm=True, seconds=ENOUGH_SECONDS))


if __name__ == "__main__":
    main(sys.argv[1])
