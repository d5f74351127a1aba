"""What a Hessian-vector product costs beside the gradient: each kind, `jax.lax.scan`, Equinox's loop, and Diffrax's."""

from collections.abc import Callable
from typing import Any

import diffrax
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
from jax import Array

import loopax as lx
from benchmarks import workloads
from benchmarks.groups import Group, Target
from benchmarks.measure import Case
from benchmarks.workloads import Workload

KINDS = {
    "Auto()": lx.Auto(),
    "Checkpointed()": lx.Checkpointed(),
    "Checkpointed(10)": lx.Checkpointed(10),
    "Bounded()": lx.Bounded(),
    "Residuals()": lx.Residuals(),
}
BOUND, MEMORY_BOUND = 2.5, 4.0


def product(gradient: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The Hessian times the argument at this position: forward mode over reverse mode."""

    def of(*arguments: Any) -> Any:
        at = lambda x: gradient(*arguments[:position], x, *arguments[position + 1 :])
        return jax.jvp(at, arguments[position : position + 1], arguments[position : position + 1])[1]

    return of


def both(name: str, energy: Callable[..., Any], arguments: tuple[Any, ...], position: int) -> list[Case]:
    """A gradient, and a Hessian-vector product."""
    gradient = jax.grad(energy, position)
    programs = {f"gradient, {name}": gradient, f"product, {name}": product(gradient, position)}
    return [Case(key, f, arguments) for key, f in programs.items()]


def of_kinds(workload: Workload, position: int) -> Group:
    """Each kind, beside the same loop in `jax.lax` and Equinox's loop that has second derivatives."""
    arguments = workload.parameters, workload.start, jnp.int32(workload.bound)
    energies = {name: workloads.with_loopax(workload, kind) for name, kind in KINDS.items()}
    energies["lax.scan"] = workloads.with_lax_scan(workload, False)
    energies["Equinox bounded"] = workloads.with_while_loop(
        workload, eqxi.while_loop, kind="bounded", max_steps=workload.bound
    )
    cases = [case for name, f in energies.items() for case in both(name, f, arguments, position)]
    targets = [Target(f"time, {name}", f"product, {name}", f"gradient, {name}", BOUND) for name in KINDS]
    targets += [
        Target(f"temporary memory, {name}", f"product, {name}", f"gradient, {name}", MEMORY_BOUND, "temporary_mib")
        for name in KINDS
    ]
    return Group(f"Second derivatives: {workload.name}", cases, targets, rounds=7)


def with_ten_checkpoints() -> Group:
    """In both orders, and 1000 steps."""
    workload = workloads.perceptron()
    energy = workloads.with_loopax(workload, lx.Checkpointed(10))
    gradient = jax.grad(energy, 1)

    def reverse_over_reverse(parameters: Any, start: Array, n: Array) -> Array:
        return jax.grad(lambda y: jnp.vdot(gradient(parameters, y, n), start))(start)

    programs = {
        "gradient": gradient,
        "forward over reverse": product(gradient, 1),
        "reverse over reverse": reverse_over_reverse,
    }
    arguments = (workload.parameters, workload.start, jnp.int32(1000))
    cases = [Case(name, program, arguments) for name, program in programs.items()]
    targets = [
        Target("temporary memory", name, "gradient", MEMORY_BOUND, "temporary_mib")
        for name in ("forward over reverse", "reverse over reverse")
    ]
    return Group("Second derivatives with 10 checkpoints: MLP, n = 1000", cases, targets, rounds=5)


def solved(adjoint: Any) -> Callable[[Array], Array]:
    """A reaction that diffuses in 128 cells, by Diffrax: the energy at the end."""
    cells = jnp.exp(-5 * jnp.linspace(-3.0, 3.0, 128) ** 2)

    def field(_: Any, y: Array, rates: Array) -> Array:
        spread = jnp.roll(y, 1) + jnp.roll(y, -1) - 2 * y
        return rates[0] * spread + rates[1] * y * (1 - y)

    def energy(rates: Array) -> Array:
        term, control = diffrax.ODETerm(field), diffrax.PIDController(rtol=1e-5, atol=1e-5)
        options = {"args": rates, "stepsize_controller": control, "adjoint": adjoint, "max_steps": 1024}
        found: Any = diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 10.0, 0.05, cells, **options)
        return (found.ys**2).mean()

    return energy


def of_diffrax() -> Group:
    """Diffrax's adjoints, and `rewrite_loops`."""
    rates = jnp.array([2.0, 1.1])
    ours = lx.rewrite_loops(solved(diffrax.ForwardMode()))
    default = jax.grad(solved(diffrax.RecursiveCheckpointAdjoint()))
    cases = [
        *both("rewrite_loops", ours, (rates,), 0),
        *both("DirectAdjoint", solved(diffrax.DirectAdjoint()), (rates,), 0),
        Case("gradient, RecursiveCheckpointAdjoint", default, (rates,)),
    ]
    targets = [
        Target("time", "product, rewrite_loops", "gradient, rewrite_loops", BOUND),
        Target("time of products", "product, rewrite_loops", "product, DirectAdjoint", 1.0),
        Target("memory of products", "product, rewrite_loops", "product, DirectAdjoint", 1.0, "temporary_mib"),
        Target("time of gradients", "gradient, rewrite_loops", "gradient, RecursiveCheckpointAdjoint", 1.0),
    ]
    return Group("Second derivatives: Diffrax, 128 cells that react and diffuse", cases, targets, rounds=15)


def groups() -> list[Group]:
    """All tables."""
    bodies = ((workloads.lorenz(), 1), (workloads.perceptron(), 0), (workloads.recurrent(), 0))
    return [*(of_kinds(*body) for body in bodies), with_ten_checkpoints(), of_diffrax()]
