"""Simulators, samplers and solvers of other libraries under `rewrite_loops`.

They are in the locked environment; others, in which they may not go together with JAX's version, skip them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx

pytestmark = pytest.mark.slow

FALLING_SPHERE = """
<mujoco>
  <option timestep="0.002" solver="CG" iterations="8" ls_iterations="8"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 .095"><freejoint/><geom type="sphere" size=".1" mass="1"/></body>
  </worldbody>
</mujoco>
"""


def check_gradients(f, points, h=1e-6, rtol=1e-6):
    """In reverse mode, in lanes, against forward mode of the unchanged program and finite differences."""
    with pytest.raises(ValueError, match="Reverse-mode"):
        jax.eval_shape(jax.grad(f), points[0])
    program = jax.jit(lambda x: jax.jvp(f, (x,), (1.0,)))
    wanted, slopes = np.asarray([program(x) for x in points]).T
    differences = [(program(x + h)[0] - program(x - h)[0]) / (2 * h) for x in points]
    np.testing.assert_allclose(slopes, differences, rtol=1e-4, atol=1e-6)
    rewritten = lx.rewrite_loops(f)
    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(rewritten)))(points)
    np.testing.assert_allclose(values, wanted, rtol=1e-9)
    np.testing.assert_allclose(gradients, slopes, rtol=rtol)


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_a_step_of_mjx_in_contact():
    """With the CG solver and eight iterations: a sphere that touches the ground."""
    mujoco = pytest.importorskip("mujoco")
    mjx = pytest.importorskip("mujoco.mjx")
    model = mjx.put_model(mujoco.MjModel.from_xml_string(FALLING_SPHERE))
    start = mjx.make_data(model)

    def speed_after(velocity):
        moving = start.replace(qvel=start.qvel.at[2].set(velocity).at[0].set(0.3 * velocity))
        after = mjx.step(model, moving)
        return (after.qvel**2).sum()

    check_gradients(speed_after, np.array([-1.0, -0.5, 0.1]))


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def test_a_transition_of_nuts():
    """From BlackJAX, with respect to the target's scale: the tree of doublings is as deep as each lane needs."""
    blackjax = pytest.importorskip("blackjax")

    def moved(scale):
        log_density = lambda x: -0.5 * jnp.sum(scale * x**2) - 0.1 * jnp.sum(x**4)
        kernel = blackjax.nuts(log_density, step_size=0.3, inverse_mass_matrix=jnp.ones(2), max_num_doublings=4)
        state, _ = kernel.step(jax.random.key(1), kernel.init(jnp.array([0.5, -0.3])))
        return state.position.sum()

    check_gradients(moved, np.array([0.7, 1.3, 2.0]))
