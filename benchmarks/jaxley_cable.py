"""The gradient of a cable of Jaxley, by each kind and by Jaxley's own nested scans, where Jaxley is installed.

`python -m benchmarks.jaxley_cable` prints the milliseconds, the least and the median of 15 calls in turn.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxley as jx  # pyright: ignore[reportMissingImports] - of the environments of `make clients`
from jaxley.channels import HH  # pyright: ignore[reportMissingImports]

import loopax as lx

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
    calls = {name: jax.jit(jax.value_and_grad(f)).lower(conductance).compile() for name, f in programs().items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(CALLS):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(conductance))
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        ordered, memory = sorted(times), calls[name].memory_analysis()
        assert memory is not None
        mebibytes = memory.temp_size_in_bytes / 2**20
        print(f"{name:14}{1e3 * ordered[0]:8.1f}{1e3 * ordered[CALLS // 2]:8.1f} ms {mebibytes:8.3f} MiB")


if __name__ == "__main__":
    main()
