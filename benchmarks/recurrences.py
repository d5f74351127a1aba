"""Gradients and forward passes of recurrences: every kind, against what other libraries have."""

from typing import Any

from jax import lax

import loopax as lx
from benchmarks import peers, workloads
from benchmarks.groups import EQUINOX, EVERY_CARRY, LAX_SCAN, Group, Target
from benchmarks.measure import Case


def gradients(workload: workloads.Workload, to_equinox: float, to_every_carry: float, memory: float) -> Group:
    """Checkpointed() and what is taken by default, against Equinox; and against saving every carry."""
    name, default = "loopax Checkpointed()", "loopax Auto()"
    programs = {
        name: workloads.with_loopax(workload, lx.Checkpointed()),
        default: workloads.with_loopax(workload, lx.Auto()),
        EQUINOX: workloads.with_equinox(workload),
        EVERY_CARRY: workloads.with_lax_scan(workload, checkpoint=True),
        LAX_SCAN: workloads.with_lax_scan(workload, checkpoint=False),
        "loopax Bounded(), run-time n": workloads.with_loopax(workload, lx.Bounded()),
        "loopax Residuals(), run-time n": workloads.with_loopax(workload, lx.Residuals()),
    } | peers.programs(workload)
    cases = [Case(key, workloads.gradient(workload, f), workload.arguments) for key, f in programs.items()]
    return Group(
        f"Gradient: {workload.name}",
        cases,
        [
            Target("time", name, EQUINOX, to_equinox),
            Target("time", default, EQUINOX, 1.0),
            Target("time", name, EVERY_CARRY, to_every_carry),
            Target("temporary memory", name, EQUINOX, memory, "temporary_mib"),
            Target("trace and compile", name, EQUINOX, 1.0, "compile_seconds"),
        ],
        compilations=3,
        missing=peers.missing(*peers.WHILE_LOOPS),
    )


def static_kinds(workload: workloads.Workload) -> Group:
    """Residuals() and Bounded() where the number of steps is static, against what JAX has for that."""
    programs = {
        "loopax Residuals()": workloads.with_loopax(workload, lx.Residuals(), static=True),
        LAX_SCAN: workloads.with_lax_scan(workload, checkpoint=False),
        "loopax Bounded()": workloads.with_loopax(workload, lx.Bounded(), static=True),
        EVERY_CARRY: workloads.with_lax_scan(workload, checkpoint=True),
    }
    cases = [Case(key, workloads.gradient(workload, f), workload.arguments) for key, f in programs.items()]
    targets = [
        Target(quantity, ours, theirs, 1.05, attribute)
        for ours, theirs in [("loopax Residuals()", LAX_SCAN), ("loopax Bounded()", EVERY_CARRY)]
        for quantity, attribute in [("time", "milliseconds"), ("temporary memory", "temporary_mib")]
    ]
    return Group(f"Gradient, static n: {workload.name}", cases, targets)


def forward(workload: workloads.Workload) -> Group:
    """Every kind without a gradient, against `lax.while_loop` (run-time n) and `lax.scan` (static n)."""
    kinds = [lx.Lax(), lx.Checkpointed(), lx.Bounded(), lx.Residuals()]
    programs: dict[str, Any] = {
        "lax.while_loop": workloads.with_while_loop(workload, lax.while_loop),
        LAX_SCAN: workloads.with_lax_scan(workload, checkpoint=False),
    }
    programs |= {f"loopax {kind}": workloads.with_loopax(workload, kind) for kind in kinds}
    programs |= {f"loopax {kind}, static n": workloads.with_loopax(workload, kind, static=True) for kind in kinds}
    targets = [Target("time", f"loopax {kind}", "lax.while_loop", 1.05) for kind in kinds]
    targets += [Target("time", f"loopax {kind}, static n", LAX_SCAN, 1.05) for kind in kinds]
    cases = [Case(name, program, workload.arguments) for name, program in programs.items()]
    return Group(f"Forward: {workload.name}", cases, targets, rounds=21)


def groups() -> list[Group]:
    """All tables."""
    lorenz, by_indices = workloads.lorenz(), workloads.lorenz_indexed()
    perceptron, recurrent = workloads.perceptron(), workloads.recurrent()
    return [
        gradients(lorenz, 0.08, 0.5, 1.0),
        gradients(by_indices, 0.08, 0.5, 1.0),
        gradients(perceptron, 0.82, 1.25, 1.0),
        gradients(recurrent, 0.95, 1.22, 1.1),
        static_kinds(perceptron),
        static_kinds(recurrent),
        forward(lorenz),
        forward(perceptron),
        forward(recurrent),
    ]
