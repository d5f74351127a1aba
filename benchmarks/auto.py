"""What `Auto` takes, beside the fastest kind that fits, for three budgets of each program."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

import loopax as lx
from benchmarks import cost_programs
from benchmarks.cost_programs import Program
from benchmarks.groups import Findings
from loopax._src.core import LoopFacts, Plan
from loopax._src.insight.compare import compiled, interleaved
from loopax._src.settings import DEFAULT_MEMORY

ROUNDS = 15
COMPILED = 2  # A program can take a third longer after another compilation. The best of so many counts.


@dataclass(frozen=True)
class Asking(lx.Kind):
    """A kind that remembers what it was told of the loop."""

    kind: lx.Kind
    told: list[LoopFacts] = field(default_factory=list, compare=False)

    def plan(self, loop: LoopFacts) -> Plan:
        """That of the other kind."""
        self.told.append(loop)
        return self.kind.plan(loop)


@dataclass(frozen=True)
class Choices:
    """What there is to choose from for the loop of a program."""

    program: Program

    @cached_property
    def loop(self) -> LoopFacts:
        """What kinds are told of it: of the outermost loop, whose gradient is taken last."""
        asking = Asking(lx.Checkpointed())
        jax.make_jaxpr(self.program.gradient(asking))(*self.program.arguments)
        return asking.told[-1]

    @property
    def budgets(self) -> list[int]:
        """The default, and two in which one and both of the kinds that store something for each step have no room."""
        stored = sorted(cost.memory for kind in (lx.Residuals(), lx.Bounded()) if (cost := kind.cost(self.loop)))
        least = 2 * self.loop.step.carry_bytes
        return [DEFAULT_MEMORY, *(max(int(memory // 2), least) for memory in reversed(stored))]

    def within(self, budget: int) -> list[lx.Kind]:
        """The kinds that fit."""
        return list(lx.Auto(budget)._candidates(self.loop))

    @property
    def kinds(self) -> list[lx.Kind]:
        """Those that fit in one of the budgets."""
        return list(dict.fromkeys(kind for budget in self.budgets for kind in self.within(budget)))

    def taken(self, budget: int) -> lx.Kind:
        """The kind that `Auto` takes: of those that fit, it is the one with the same plan."""
        plan = lx.Auto(budget).plan(self.loop)
        return next(kind for kind in self.within(budget) if kind.plan(self.loop).because(plan.reason) == plan)

    def milliseconds(self) -> dict[lx.Kind, float]:
        """Of the gradient with every kind. Kinds with the same plan are the same program."""
        plans = {kind: kind.plan(self.loop).because("") for kind in self.kinds}
        programs = [self.program.gradient(kind) for kind in self.kinds for _ in range(COMPILED)]
        times = interleaved([compiled(program, self.program.arguments).call for program in programs], ROUNDS)
        least = [min(times[COMPILED * i : COMPILED * (i + 1)]) for i in range(len(self.kinds))]
        of_plan: dict[Plan, float] = {}
        for plan, time in zip(plans.values(), least, strict=True):
            of_plan[plan] = min(time, of_plan.get(plan, time))
        return {kind: of_plan[plan] for kind, plan in plans.items()}


def rows(program: Program) -> list[dict[str, Any]]:
    """One for each budget."""
    choices = Choices(program)
    times = choices.milliseconds()
    found = []
    for budget in choices.budgets:
        fitting = {kind: times[kind] for kind in choices.within(budget)}
        taken, fastest = choices.taken(budget), min(fitting, key=lambda kind: fitting[kind])
        ratio = fitting[taken] / fitting[fastest]
        found.append(
            {
                "program": program.name,
                "budget, MiB": budget / 2**20,
                "Auto takes": repr(taken),
                "ms": fitting[taken],
                "the fastest": repr(fastest),
                "ms of it": fitting[fastest],
                "Auto / the fastest": ratio,
                "within 1.25": ratio <= 1.25,
            }
        )
    return found


def tables() -> list[Findings]:
    """Programs to judge on, and those that the constants were fitted on."""
    of = lambda programs: lambda: [row for program in programs() for row in rows(program)]
    return [
        Findings("Auto: programs that it has not seen", of(cost_programs.unseen), "Bounds: median 1.05, worst 1.25."),
        Findings("Auto: programs that its costs were fitted on", of(cost_programs.to_fit)),
    ]
