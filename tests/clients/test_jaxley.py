"""A cable of Jaxley with Hodgkin-Huxley channels: the gradient of its voltages with respect to a conductance."""

import jax.numpy as jnp
import jaxley as jx
import pytest
from jaxley.channels import HH

import loopax as lx
from tests.clients.conftest import SIZE
from tests.clients.gradients import check_gradient

STEP = 0.025  # milliseconds


@pytest.fixture(scope="module")
def cable():
    branch = jx.Branch(jx.Compartment(), ncomp=4)
    branch.insert(HH())
    branch.comp(0).stimulate(jx.step_current(i_delay=0.1, i_dur=0.5, i_amp=1.0, delta_t=STEP, t_max=1.0))
    branch.comp(3).record()
    branch.make_trainable("HH_gNa")
    return branch


@pytest.mark.parametrize("kind", ["auto", "checkpointed"] if SIZE == "whole" else ["auto"])
def test_voltages(cable, kind):
    def voltages(conductance):
        found = jx.integrate(cable, params=[{"HH_gNa": conductance}], delta_t=STEP)
        return (found[:, ::10] ** 2).mean()

    check_gradient(lx.rewrite_loops(voltages, kind=kind, scans=True), jnp.array([0.12]), original=voltages, step=1e-6)
