"""Budgets of checkpoints against Equinox with as many, loops without a bound, and `Auto`."""

from collections.abc import Callable

import equinox.internal as eqxi
from jax import Array

import loopax as lx
from benchmarks import choices, workloads
from benchmarks.groups import Group, Target
from benchmarks.measure import Case
from benchmarks.workloads import Workload


def with_loopax(workload: Workload, kind: lx.Kind) -> Callable[..., Array]:
    """A while loop without a bound."""
    return workloads.with_while_loop(workload, lx.while_loop, kind=kind)


def with_equinox(workload: Workload, checkpoints: int, bound: int | None) -> Callable[..., Array]:
    """Equinox's, with a bound if one is given."""
    options = {"kind": "checkpointed", "checkpoints": checkpoints, "max_steps": bound}
    return workloads.with_while_loop(workload, eqxi.while_loop, **options)


def few_checkpoints(workload: Workload, bound: float) -> Group:
    """10 and 20 checkpoints, known and unknown length."""
    cases, targets = [], []
    for c in (10, 20):
        known, unknown, peer = f"loopax, {c}", f"loopax while_loop without a bound, {c}", f"Equinox, {c}"
        programs = {
            known: workloads.with_loopax(workload, lx.Checkpointed(c)),
            unknown: with_loopax(workload, lx.Checkpointed(c)),
            peer: with_equinox(workload, c, workload.bound),
        }
        cases += [Case(key, workloads.gradient(workload, f), workload.arguments) for key, f in programs.items()]
        for ours in (known, unknown):
            targets.append(Target("time", ours, peer, bound))
            targets.append(Target("temporary memory", ours, peer, 1.0, "temporary_mib"))
    return Group(f"Gradient with 10 and 20 checkpoints: {workload.name}", cases, targets, rounds=7)


def without_a_bound() -> Group:
    """The default number of slots, against Equinox with as many."""
    workload = workloads.lorenz()
    ours, theirs = "loopax while_loop, default", "Equinox, 64 checkpoints"
    programs = {ours: with_loopax(workload, lx.Checkpointed()), theirs: with_equinox(workload, 64, None)}
    cases = [Case(key, workloads.gradient(workload, f), workload.arguments) for key, f in programs.items()]
    targets = [Target("time", ours, theirs, 0.15), Target("temporary memory", ours, theirs, 1.0, "temporary_mib")]
    return Group(f"Gradient without a bound: {workload.name}", cases, targets, rounds=7)


def automatic(workload: Workload, memory: int | None = None, fits: int = 3, static: bool = True) -> Group:
    """`Auto` against the first so many of the kinds that fit, those that store least first."""
    kinds = {"Checkpointed()": lx.Checkpointed(), "Bounded()": lx.Bounded(), "Residuals()": lx.Residuals()}
    auto = lx.Auto() if memory is None else lx.Auto(memory=memory)
    programs = {name: workloads.with_loopax(workload, kind, static) for name, kind in [("Auto", auto), *kinds.items()]}
    cases = [Case(name, workloads.gradient(workload, f), workload.arguments) for name, f in programs.items()]
    title = f"Auto: {workload.name}{'' if static else ', known at run time'}"
    title += "" if memory is None else f", memory={memory / 2**20:g} MiB"
    return Group(title, cases, [Target("time", "Auto", tuple(kinds)[:fits], 1.15)], rounds=7)


def groups() -> list[Group]:
    """All tables."""
    return [
        few_checkpoints(workloads.lorenz(), 0.5),
        few_checkpoints(workloads.perceptron(), 0.75),
        few_checkpoints(workloads.recurrent(), 0.8),
        without_a_bound(),
        *map(automatic, choices.programs()),
        automatic(workloads.perceptron(), memory=2**20, fits=1),
        automatic(workloads.recurrent(), memory=20 * 2**20, fits=2),
        automatic(workloads.lorenz(), static=False),
        automatic(choices.dense(), fits=2, static=False),
    ]
