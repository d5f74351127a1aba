"""Compile programs for an H100 and for a TPU v5e, on a machine with neither."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # by several processes: there is no device that they would share

import jax
import numpy as np
from jax._src.interpreters.mlir import ModuleContext
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import loopax as lx
from benchmarks.accelerators.iterations import numbered

# The properties of an H100 80GB SXM that XLA asks for: NVIDIA's "H100 Tensor Core GPU Architecture", and the CUDA
# programming guide for compute capability 9.0.
_GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "memory_bandwidth": 3352320000000,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 84929347584,
    "shared_memory_per_block_optin": 232448,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
_H100 = (
    f"gpu_device_info {{ {' '.join(f'{name}: {value}' for name, value in _GPU.items())} "
    "cuda_compute_capability { major: 9 } } runtime_version { major: 12 minor: 9 patch: 0 } "
    'platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 } device_description_str: "NVIDIA H100 80GB HBM3"'
)


class Target(NamedTuple):
    """A device, for which `lx.configure(calibration=name)` holds."""

    name: str
    platform: str
    topology: dict[str, str]  # as `jax.experimental.topologies` takes it


TARGETS = {
    "h100": Target("h100", "gpu", {"platform": "cuda", "target_config": _H100, "topology": "1x1x1"}),
    "tpu-v5e": Target("tpu-v5e", "tpu", {"platform": "tpu", "topology_name": "v5e:2x2"}),
}


@cache
def devices(name: str) -> list[Any]:
    """One GPU, or four chips."""
    return list(topologies.get_topology_desc(**TARGETS[name].topology).devices)


class Compiled(NamedTuple):
    """A program for a device."""

    text: str  # optimised HLO
    temporary: int  # bytes
    seconds: float  # to trace and to compile


def compiled(target: Target, function: Callable[..., Any], *arguments: Any, mesh: Mesh | None = None) -> Compiled:
    """The program of a function for one device, or for a mesh of them on which each argument lies whole."""
    place = SingleDeviceSharding(devices(target.name)[0]) if mesh is None else NamedSharding(mesh, PartitionSpec())
    avals = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.numpy.result_type(x), sharding=place), arguments
    )
    jax.clear_caches()
    start = time.perf_counter()
    with _as_on(target), numbered():
        lowered = jax.jit(function).lower(*avals)
    if target.platform == "gpu":  # which looks callbacks up when it runs
        lowered._lowering.compile_args["host_callbacks"] = []
    program = lowered.compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    return Compiled(program.as_text() or "", getattr(memory, "temp_size_in_bytes", 0), seconds)


def steps_taken(target: Target, function: Callable[..., Any], *arguments: Any) -> Counter[int]:
    """How many steps the loops of the program take, by their numbers."""
    taken = Counter[int]()
    jax.clear_caches()
    with _as_on(target), numbered(taken):
        jax.block_until_ready(jax.jit(function)(*arguments))
    jax.effects_barrier()
    return taken


@contextmanager
def _as_on(target: Target) -> Iterator[None]:
    """Trace and lower as on a machine that has this device.

    A callback asks the client of a device to make an object for it. The client of the CPU does it as well.
    """
    client = jax.devices("cpu")[0].client
    with (
        lx.configure(calibration=target.name),
        mock.patch.object(jax, "default_backend", return_value=target.platform),
        mock.patch.object(ModuleContext, "get_backend", return_value=client),
    ):
        yield


def mesh_of(target: Target, name: str = "devices") -> Mesh:
    """All devices of a target in a row."""
    return Mesh(np.array(devices(target.name)), (name,))
