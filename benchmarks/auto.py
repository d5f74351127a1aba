"""What `Auto` takes, beside the fastest kind that fits, for three budgets of each program."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax

import loopax as lx
from benchmarks import cost_programs
from benchmarks.cost_programs import Program
from loopax._src.core import LoopFacts, Plan
from loopax._src.insight.timing import compiled, interleaved

ROUNDS = 15
COMPILED = 2  # the same program can take a third longer after another compilation: the best counts
EQUAL_MEMORY = 256 * 2**20


@dataclass(frozen=True)
class Asking(lx.Kind):
    """A kind that remembers what it was told of the loop."""

    kind: lx.Kind
    told: list[LoopFacts] = field(default_factory=list, compare=False)

    def plan(self, loop: LoopFacts) -> Plan:
        """That of the other kind."""
        self.told.append(loop)
        return self.kind.plan(loop)


def facts_of(program: Program) -> LoopFacts:
    """What kinds are told of the program's loop."""
    asking = Asking(lx.Checkpointed())
    jax.make_jaxpr(program.gradient(asking))(*program.arguments)
    return max(asking.told, key=lambda loop: loop.bound or 0)


def budgets(loop: LoopFacts) -> list[int]:
    """The default, and what one and both of the kinds that store something for each step do not fit in."""
    stored = sorted(cost.memory for kind in (lx.Residuals(), lx.Bounded()) if (cost := kind.cost(loop)))
    least = 2 * loop.step.carry_bytes
    return [EQUAL_MEMORY, *(max(int(memory // 2), least) for memory in reversed(stored))]


def kinds_within(loop: LoopFacts, budget: int) -> list[lx.Kind]:
    """The kinds that `Auto` chooses among."""
    kinds = [lx.Residuals(), lx.Bounded(), lx.Checkpointed().within(budget, loop)]
    if loop.is_fixed and loop.step.carry_bytes and loop.bound * loop.step.residual_bytes > budget:
        kinds.append(lx.Checkpointed(min(budget // loop.step.carry_bytes, loop.bound)))
    return [kind for kind in kinds if (cost := kind.cost(loop)) and cost.memory <= budget]


def measured(program: Program) -> dict[str, float]:
    """The milliseconds of every kind that is a choice."""
    loop = facts_of(program)
    kinds = list(dict.fromkeys(kind for budget in budgets(loop) for kind in kinds_within(loop, budget)))
    calls = [compiled(program.gradient(kind), program.arguments).call for kind in kinds for _ in range(COMPILED)]
    times = interleaved(calls, ROUNDS)
    return {repr(kind): min(times[COMPILED * i : COMPILED * (i + 1)]) for i, kind in enumerate(kinds)}


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for program in getattr(cost_programs, sys.argv[2])():
        found = json.loads(out.read_text()) if out.exists() else {}
        found[program.name] = measured(program)
        print(program.name, {k: round(v, 2) for k, v in found[program.name].items()}, flush=True)
        out.write_text(json.dumps(found, indent=1))
