"""Programs that several processes run together, and one process alone for comparison."""

import time
import warnings
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import loopax as lx
from loopax import durable
from loopax._src.durable import gradient_plan

LANES = 10  # which 4 and 8 devices do not divide
FEATURES, SIZE = 8, 1 << 15


def mesh_of(devices: Any) -> Mesh:
    """All devices in a row."""
    return Mesh(np.array(devices), ("d",), axis_types=(AxisType.Auto,))


def lanes(mesh: Mesh) -> dict[str, Any]:
    """Lanes of different length, their gradients, and that of weights which they share."""
    counts = np.array([3, 40, 1, 7, 0, 12, 5, 2, 9, 21])
    starts, weight = np.linspace(-1.0, 1.0, LANES), np.float64(1.1)

    def values(weight: Any, starts: Any, counts: Any) -> Any:
        step = lambda _, h: jnp.sin(weight * h) + 0.1
        lane = lambda h, n: lx.fori_loop(0, n, step, h, max_steps=50, lanes=lx.Compact(min_lanes=1))
        return lx.sharded_lanes(lane, mesh, "d")(starts, counts, counts=counts)

    total = lambda weight, starts: (values(weight, starts, counts) ** 2).sum()
    gradients = jax.jit(jax.grad(total, (0, 1)))(weight, starts)
    return {"values": jax.jit(values)(weight, starts, counts), "weight": gradients[0], "starts": gradients[1]}


def carry(mesh: Mesh) -> dict[str, Any]:
    """A loop whose carry is sharded over all devices, and its gradient."""
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    values = np.linspace(-1.0, 1.0, FEATURES)
    start = jax.make_array_from_callback((FEATURES,), sharding, lambda index: values[index])

    def total(h: Any, n: Any) -> Any:
        h, ys = lx.scan(lambda h, _: (jnp.sin(h) * 1.1, h), h, None, length=n, max_steps=30)
        return (h**2).sum() + ys.sum(), h

    (_, h), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(start, np.int64(20))
    return {"carry": h, "gradient": gradient}


def results(devices: Any) -> dict[str, Any]:
    """What is compared."""
    mesh = mesh_of(devices)
    with jax.set_mesh(mesh):
        return {"lanes": lanes(mesh), "carry": carry(mesh)}


def shards(tree: Any) -> dict[str, list[Any]]:
    """The bits of all shards in this process, by the name of the array."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path): sorted(
            [str(shard.index), np.asarray(shard.data).tobytes().hex()] for shard in leaf.addressable_shards
        )
        for path, leaf in leaves
    }


def of_all_devices() -> dict[str, list[Any]]:
    """What each process finds."""
    return shards(results(jax.devices()))


def durable_results(devices: Any, directory: str, steps: int, every: int, marks: str = "") -> dict[str, Any]:
    """A chaotic map of a carry that is spread over all devices, a count that is not, and outputs on disk.

    Each step takes a millisecond and writes its number into the file `marks`, where there is one.
    """
    spread = NamedSharding(mesh_of(devices), PartitionSpec("d"))
    values = np.linspace(0.1, 0.9, SIZE)
    start = jax.make_array_from_callback((SIZE,), spread, lambda index: values[index])

    def mark(number: Any) -> Any:
        with open(marks, "ab") as file:
            file.write(np.int64(number).tobytes())
        time.sleep(0.001)
        return np.asarray(number)

    def step(carry: Any, _: Any, key: Any) -> tuple[Any, Any]:
        x, number = carry
        if marks:
            number = jax.pure_callback(mark, jax.ShapeDtypeStruct((), jnp.int64), number)
        for _ in range(4):
            x = 3.9 * x * (1 - x)
        x = jnp.clip(x + 1e-3 * jax.random.uniform(key), 0.01, 0.99)
        return (x, number + 1), {"number": number, "some": x[:8]}

    carry, ys = durable.scan(
        step, (start, jnp.int64(0)), length=steps, key=jax.random.key(3), directory=directory, checkpoint_every=every
    )
    return {"carry": carry, "rows": {name: jnp.asarray(np.asarray(rows)) for name, rows in ys.items()}}


def durable_of_all_devices(directory: str, steps: str, every: str, *marks: str) -> dict[str, list[Any]]:
    """What each process finds."""
    return shards(durable_results(jax.devices(), directory, int(steps), int(every), *marks))


def gradient_results(devices: Any, directory: str, marks: str = "", every: Any = 60.0, **options: Any) -> Any:
    """Gradients of a run whose carry is spread over all devices, in 40 chunks of ten milliseconds.

    Each chunk that is evaluated leaves a mark, where there is a file for marks.
    """
    mesh = mesh_of(devices)
    spread = NamedSharding(mesh, PartitionSpec("d"))
    values = np.linspace(0.1, 0.9, SIZE)
    start = jax.make_array_from_callback((SIZE,), spread, lambda index: values[index])

    def step(rate: Any, x: Any, drive: Any) -> tuple[Any, Any]:
        x = jnp.sin(rate * x) + drive
        return x, (x[:8] ** 2).sum()

    @contextmanager
    def marked() -> Any:
        forward, record = gradient_plan.Programs.forward, gradient_plan.Programs.record

        def leaving(function: Any) -> Any:
            def marking(*arguments: Any) -> Any:
                with open(marks, "ab") as file:
                    file.write(b"x")
                time.sleep(0.01)
                return function(*arguments)

            return marking

        gradient_plan.Programs.forward, gradient_plan.Programs.record = leaving(forward), leaving(record)
        try:
            yield
        finally:
            gradient_plan.Programs.forward, gradient_plan.Programs.record = forward, record

    with marked() if marks else nullcontext():
        run = durable.value_and_grad(
            lambda rate, x, total: total + x.sum(),
            step,
            directory=directory,
            chunk_steps=5,
            checkpoint_every=float(every),
            **options,
        )
        value, found = run(np.float64(1.1), start, np.sin(np.arange(200.0)))
    rows = jnp.asarray(np.asarray(found.xs))
    return {"value": value, "params": found.params, "init": found.init, "xs": rows}


def gradient_of_all_devices(directory: str, *options: str) -> dict[str, list[Any]]:
    """What each process finds, with room for six states on disk."""
    return shards(gradient_results(jax.devices(), directory, *options, disk=6 * 8 * (SIZE + 1), memory=2**22))


def gradient_of_unlike_clocks(directory: str) -> dict[str, list[Any]]:
    """What each process finds, if a second of the second one lasts a millisecond for the first one."""
    clock, factor = time.perf_counter, 1000.0 ** (jax.process_index() - 1)
    gradient_plan.__dict__["time"] = SimpleNamespace(perf_counter=lambda: factor * clock())
    return gradient_of_all_devices(directory)


def measured_slope(kind: Any, rate: float) -> Any:
    """The gradient of a loop as a jaxpr, in which its choice stands."""
    swing = lambda x: lx.fori_loop(0, 40, lambda _, x: jnp.sin(rate * x) + 0.1 * x**2, x, kind=kind).sum()
    return jax.make_jaxpr(jax.grad(swing))(jnp.ones(8))


def tuned_of_all(folder: str) -> list[Any]:
    """What each process takes for a loop that the first one's folder knows, and for another; and what it warns of."""
    kind = lx.Tuned(cache=f"{folder}/{jax.process_index()}")
    known = str(measured_slope(kind, 1.5))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        other = str(measured_slope(kind, 2.5))
    return ["made by hand" in known, "made by hand" in other, [str(w.message).split(",")[0] for w in warned]]
