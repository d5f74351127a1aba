"""Strict settings for all tests: float64, no silent promotion, eight virtual devices."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compilation makes an example slow, and more so on a busy machine: that is no failure.
settings.register_profile("loopax", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("loopax")


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Compiled programs of one file are of no use to the next, and add up to gigabytes."""
    yield
    jax.clear_caches()
