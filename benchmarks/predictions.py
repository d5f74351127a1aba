"""The temporary memory that `explain` predicts from a trace, beside what the compiler reports."""

from typing import Any

import jax

import loopax as lx
from benchmarks import choices, workloads
from benchmarks.groups import Findings

KINDS = (lx.Auto(), lx.Checkpointed(), lx.Checkpointed(10), lx.Bounded(), lx.Residuals())
SMALL, LITTLE, SHARE = 2**20, 64 * 1024, 0.15  # the bound: 15 %, or 64 KiB where the stored carries are under 1 MiB


def row(workload: workloads.Workload, kind: lx.Kind) -> dict[str, Any]:
    """One program and kind."""
    program = workloads.with_loopax(workload, kind, static=True)
    found = lx.explain(program, *workload.arguments, argnums=workload.differentiated)
    (loop,) = found.loops
    compiled = jax.jit(workloads.gradient(workload, program)).lower(*workload.arguments).compile()
    predicted, memory = found.gradient_bytes or 0, compiled.memory_analysis()
    assert memory is not None
    reported = memory.temp_size_in_bytes
    off = abs(predicted - reported)
    return {
        "program": workload.name,
        "kind": "Auto()" if kind == lx.Auto() else repr(kind),
        "stored carries, MiB": loop.stored_bytes / 2**20,
        "predicted MiB": predicted / 2**20,
        "reported MiB": reported / 2**20,
        "predicted / reported": predicted / reported,
        "within the bound": off <= LITTLE if loop.stored_bytes < SMALL else off <= SHARE * reported,
    }


def predicted() -> list[dict[str, Any]]:
    """The eight programs with every kind."""
    return [row(workload, kind) for workload in choices.programs() for kind in KINDS]


def tables() -> list[Findings]:
    """What is counted, not timed."""
    title = "Temporary memory of a gradient: predicted by `explain`, reported by XLA"
    remark = "Bound: 15 %, or 64 KiB where the stored carries are under 1 MiB."
    return [Findings(title, predicted, remark, memory=("predicted MiB", "reported MiB"))]
