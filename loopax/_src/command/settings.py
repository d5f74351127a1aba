"""Devices, and the settings of JAX that change what a loop does."""

import os
from typing import Any, NamedTuple

import jax


class Setting(NamedTuple):
    """A setting and what it means; no note where it is what most people have."""

    name: str
    value: str
    note: str = ""


# Name, the usual value, and what another one means for a loop.
_FLAGS = [
    ("jax_disable_jit", False, "loops run in Python, step by step: slow, for debugging"),
    ("jax_debug_nans", False, "a NaN in any result is an error, and what made it runs again without jit"),
    ("jax_debug_infs", False, "an infinity in any result is an error, and what made it runs again without jit"),
    ("jax_check_tracer_leaks", False, "tracing is slow, and is done again for every call"),
    ("jax_numpy_rank_promotion", "allow", "shapes of different rank in a body may be refused"),
    ("jax_numpy_dtype_promotion", "standard", "mixed dtypes in a body are refused"),
]
_VARIABLES = (
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)


def settings() -> list[Setting]:
    """What the machine has, and how JAX is set."""
    return [*_devices(), _precision(), *_flags(), _cache(), *_environment()]


def _devices() -> list[Setting]:
    devices = jax.devices()
    kinds = sorted({device.device_kind for device in devices})
    found = [Setting("devices", f"{len(devices)} x {jax.default_backend()} ({', '.join(kinds)})")]
    if jax.process_count() > 1:
        found.append(Setting("processes", f"{jax.process_count()}, this is number {jax.process_index()}"))
    return found


def _precision() -> Setting:
    if _flag("jax_enable_x64"):
        return Setting("jax_enable_x64", "True", "numbers have 64 bits unless said otherwise")
    return Setting("jax_enable_x64", "False", "float64 becomes float32")


def _flags() -> list[Setting]:
    values = [(name, _flag(name), usual, note) for name, usual, note in _FLAGS]
    return [Setting(name, str(value), "" if value == usual else note) for name, value, usual, note in values]


def _cache() -> Setting:
    directory = _flag("jax_compilation_cache_dir")
    if directory is None:
        return Setting("compilation cache", "off", "jax_compilation_cache_dir would keep compiled programs")
    return Setting("compilation cache", str(directory), "programs that call Python (run-time checks) may not be kept")


def _flag(name: str) -> Any:
    return getattr(jax.config, name)


def _environment() -> list[Setting]:
    """Each flag on a line of its own."""
    found = [(name, os.environ.get(name, "").split()) for name in _VARIABLES]
    return [Setting(name, value) for name, values in found for value in dict.fromkeys(values)]
