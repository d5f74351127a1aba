"""Strict settings for all tests: float64, no silent promotion, eight virtual devices."""

import gc
import os
from importlib.metadata import version

# Nearly all time goes to compilation, and the programs are small. Without optimization they take half the time, give
# the same values up to rounding, and report the same temporary memory to the byte (`memory_analysis`).
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",  # tests run in parallel already
        # XLA ends a process that names a flag which it does not have, as it has no more in jaxlib 0.12.
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
    ]
)

# Small factorizations gain nothing from threads, and lose much to them where several tests run at once.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import jax
import pytest
from hypothesis import HealthCheck, settings

# Traces are many small objects that live as long as a test: looking for garbage as often as Python does takes a
# twentieth of the time.
gc.set_threshold(200_000, 50, 100)

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
