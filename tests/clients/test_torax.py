"""A transport simulation of torax: `fixed_time_step` is a `while_loop`, without a reverse mode of its own."""

from typing import Any

import jax.numpy as jnp
import torax
from torax import experimental
from torax.examples import basic_config

import loopax as lx
from tests.clients.conftest import SIZE

# The gradient of all sources compiles for more than a minute on a machine that does nothing else.
FEW_SOURCES: dict[str, Any] = {"ei_exchange": {}, "generic_heat": {}, "generic_current": {}}


def simulation():
    """Two steps of half a second; with all sources, of steps that are adaptive."""
    config: dict[str, Any] = {
        **basic_config.CONFIG,
        "geometry": {"geometry_type": "circular", "n_rho": 4},
        "numerics": {"t_final": 2.0, "fixed_dt": 0.5, "adaptive_dt": SIZE == "whole"},
        "time_step_calculator": {"calculator_type": "fixed"},
    }
    if SIZE != "whole":
        config["sources"] = FEW_SOURCES
    step = experimental.make_step_fn(torax.ToraxConfig.from_dict(config))
    start = experimental.get_initial_state_and_post_processed_outputs(step)

    def temperatures(exchange):
        """Of electrons, where they exchange so much more heat with ions."""
        provider = step.runtime_params_provider
        changed = provider.update_provider_from_mapping({"sources.ei_exchange.Qei_multiplier": exchange})
        last, _ = step.fixed_time_step(jnp.asarray(1.0), *start, changed)
        return last.core_profiles.T_e.value.sum()

    return temperatures


def test_fixed_time_step(check):
    temperatures = simulation()
    check(lx.rewrite_loops(temperatures), 1.3, original=temperatures, step=1e-4)
