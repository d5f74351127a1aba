"""The gradient of a cable of Jaxley, by each kind and by Jaxley's own nested scans, where Jaxley is installed.

`python -m benchmarks.jaxley_cable` prints the milliseconds of 15 calls in turn, as the benchmark takes them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxley as jx  # pyright: ignore[reportMissingImports] - of the environments of `make clients`
from jaxley.channels import HH  # pyright: ignore[reportMissingImports]

import loopax as lx
from benchmarks.measure import Case, measure

STEP, STEPS, COMPARTMENTS = 0.025, 2500, 4  # milliseconds
NESTED = [14, 14, 13]
CALLS = 15


def cable() -> Any:
    """A branch with Hodgkin-Huxley channels, whose sodium conductance is trained."""
    branch = jx.Branch(jx.Compartment(), ncomp=COMPARTMENTS)
    branch.insert(HH())
    current = jx.step_current(i_delay=1.0, i_dur=5.0, i_amp=1.0, delta_t=STEP, t_max=STEPS * STEP)
    branch.comp(0).stimulate(current)
    branch.comp(COMPARTMENTS - 1).record()
    branch.make_trainable("HH_gNa")
    return branch


def programs() -> dict[str, Callable[[Any], Any]]:
    """The energy of some voltages as a function of the conductance."""
    branch = cable()

    def energy(conductance: Any, **options: Any) -> Any:
        found = jx.integrate(branch, params=[{"HH_gNa": conductance}], delta_t=STEP, **options)
        return (found[:, ::10] ** 2).mean()

    found = {"nested": lambda g: energy(g, checkpoint_lengths=NESTED), "lax.scan": energy}
    kinds = "auto", "residuals", "bounded", "checkpointed"
    return found | {kind: lx.rewrite_loops(energy, kind=kind, scans=True) for kind in kinds}


def main() -> None:
    """Time them."""
    conductance = jnp.array([0.12])
    cases = [Case(name, jax.value_and_grad(f), (conductance,)) for name, f in programs().items()]
    for name, found in measure(cases, CALLS).items():
        print(f"{name:14}{found.milliseconds:8.1f} ms {found.temporary_mib:8.3f} MiB")


if __name__ == "__main__":
    main()
