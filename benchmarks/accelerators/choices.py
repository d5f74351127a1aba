"""What `Auto` takes on each device, beside every kind that fits: foretold from the compiled programs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import loopax as lx
from benchmarks import everyday
from benchmarks.accelerators.compilers import Target, compiled, steps_taken
from benchmarks.accelerators.counted import BODIES, STEPS, while_loss
from benchmarks.accelerators.foretold import DEVICES, milliseconds

KINDS: dict[str, lx.Kind] = {
    "Auto()": lx.Auto(),
    "Residuals()": lx.Residuals(),
    "Bounded()": lx.Bounded(),
    "Checkpointed()": lx.Checkpointed(),
}
Gradient = Callable[[lx.Kind], Callable[..., Any]]


def _scan(program: everyday.Program, kind: lx.Kind) -> Callable[..., Any]:
    return jax.grad(program(partial(everyday.default, kind=kind)))


def _while(step: Callable[..., Any], kind: lx.Kind) -> Callable[..., Any]:
    return jax.grad(while_loss(lx.while_loop, max_steps=2 * STEPS, kind=kind)(step), (0, 1))


# By name: a gradient whose loop is of a kind, and its arguments.
PROGRAMS: dict[str, tuple[Gradient, tuple[Any, ...]]] = {
    name: (partial(_scan, program), arguments)
    for name, (program, arguments) in (everyday.TWENTY | everyday.TEN).items()
} | {f"while loop: {name}": (partial(_while, step), tuple(arguments)) for name, (step, *arguments) in BODIES.items()}


def foretold(target: Target, name: str) -> dict[str, float]:
    """Milliseconds, by kind."""
    gradient, arguments = PROGRAMS[name]
    found = {}
    for kind, of in KINDS.items():
        text = compiled(target, gradient(of), *arguments).text
        found[kind] = milliseconds(text, DEVICES[target.name], steps_taken(target, gradient(of), *arguments))
    return found


def of_least(found: dict[str, float]) -> float:
    """What `Auto` takes, beside the least."""
    auto, *kinds = found.values()
    return auto / min(kinds)


def rows(target: Target) -> list[dict[str, Any]]:
    """Of all programs."""
    table = []
    for name in PROGRAMS:
        found = foretold(target, name)
        times = {f"{kind}, ms": round(ms, 2) for kind, ms in found.items()}
        table.append({"program": name} | times | {"Auto() / least": round(of_least(found), 2)})
        print(target.name, table[-1], flush=True)
    return table
