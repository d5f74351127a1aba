"""Streams of items through a fixed number of lanes, against batches that wait for their slowest lane."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import loopax as lx
from benchmarks.durable import peak_memory
from benchmarks.groups import Findings

ITEMS, LANES, MEDIAN = 2000, 64, 50
BOUND = 8 * MEDIAN
ROUNDS = 5


def tables() -> list[Findings]:
    """All tables."""
    return [
        Findings(
            f"Streams: {ITEMS} items of log-normal lengths through {LANES} lanes",
            times,
            "An MLP with a residual is applied as often as an item says (median 50, sigma 1, at most 400). Static "
            "batches are vmapped lax.while_loops of 64 items in their order. In turn; medians of five rounds.",
        ),
        Findings(
            "Streams: memory and compilations",
            memory,
            "A process for each row. Resident memory is the largest of the process. Of the four programs, two copy the "
            "first item's arrays, one makes the lanes without items, and one is the chunk.",
            counts=("compilations",),
            memory=("arrays on the device (MiB)",),
        ),
    ]


def weights(width: int) -> tuple[Array, Array]:
    """Of an MLP with a hidden layer that is four times as wide."""
    random = np.random.RandomState(0)
    inner, outer = random.randn(width, 4 * width) / width**0.5, random.randn(4 * width, width) / (4 * width) ** 0.5
    return jnp.asarray(inner, jnp.float32), jnp.asarray(outer, jnp.float32)


def step_of(width: int) -> Callable[[Array], Array]:
    """What is applied again and again."""
    inner, outer = weights(width)
    return lambda h: h + 0.1 * jnp.tanh(jnp.tanh(h @ inner) @ outer)


def with_loopax(step: Callable[[Array], Array]) -> Callable[[Any], Array]:
    """The result of an item."""
    return lambda item: lx.fori_loop(0, item["n"], lambda _, h: step(h), item["x"], max_steps=BOUND)


def with_lax(step: Callable[[Array], Array]) -> Callable[[Any], Array]:
    """The results of a batch of items, which waits for its slowest."""

    def one(x: Array, n: Array) -> Array:
        return lax.while_loop(lambda s: s[1] < n, lambda s: (step(s[0]), s[1] + 1), (x, jnp.int32(0)))[0]

    return jax.jit(lambda batch: jax.vmap(one)(batch["x"], batch["n"]))


def lengths(items: int) -> np.ndarray:
    """How often the step is applied to each item."""
    drawn = MEDIAN * np.exp(np.random.RandomState(1).randn(items))
    return np.clip(drawn, 1, BOUND).astype(np.int32)


def seconds(run: Callable[[], Any]) -> float:
    """Of one run."""
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def times() -> list[dict[str, Any]]:
    """Bodies of about 50 and 500 microseconds."""
    return [of_width(width) for width in (64, 192)]


def of_width(width: int) -> dict[str, Any]:
    """One row."""
    step, n = step_of(width), lengths(ITEMS)
    array = {"n": n, "x": np.random.RandomState(2).randn(ITEMS, width).astype(np.float32)}
    items = [{"n": n, "x": x} for n, x in zip(array["n"], array["x"], strict=True)]
    batched, mapped = with_lax(step), jax.jit(lambda items: lx.lanes_map(with_loopax(step), items, num_lanes=LANES))
    f, reports = with_loopax(step), []

    def streamed() -> list[Any]:
        stream = lx.lanes_stream(f, iter(items), num_lanes=LANES)
        results = [result for _, result in stream]
        reports.append(stream.report())
        return results

    def static() -> list[Any]:
        starts = range(0, ITEMS, LANES)
        padded = {key: np.concatenate([x, x[:LANES]]) for key, x in array.items()}
        return [np.asarray(batched({key: x[at : at + LANES] for key, x in padded.items()})) for at in starts]

    programs = {"stream": streamed, "static": static, "lanes_map": lambda: mapped(array)}
    rounds = [{key: seconds(run) for key, run in programs.items()} for _ in range(ROUNDS + 1)][1:]
    took = {key: median(one[key] for one in rounds) for key in programs}
    steps = sum(int(n[at : at + LANES].max()) for at in range(0, ITEMS, LANES))
    return {
        "width": width,
        "a step of a static batch (us)": 1e6 * took["static"] / steps,
        "lanes_stream (s)": took["stream"],
        "/ static batches": median(one["stream"] / one["static"] for one in rounds),
        "/ lanes_map": median(one["stream"] / one["lanes_map"] for one in rounds),
        "useful steps": reports[-1].share,
        "until the source ends": reports[-1].share_fed,
    }


def memory() -> list[dict[str, Any]]:
    """Of processes with more and more items."""
    found = []
    for items in (10, 100, 1000, 100_000):
        command = [sys.executable, "-m", "benchmarks.streams", str(items)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        resident, arrays, compilations = printed
        found.append(
            {
                "items": items,
                "resident (MiB)": int(resident) / 1024,
                "arrays on the device (MiB)": int(arrays) / 2**20,
                "compilations": int(compilations),
            }
        )
    return found


def many(items: int) -> Iterator[dict[str, np.ndarray]]:
    """Items of a few steps."""
    x = np.ones(64, np.float32)
    yield from ({"n": np.int32(1 + i % 7), "x": x} for i in range(items))


def one_process(items: int) -> None:
    """Print the largest resident memory, the most bytes of arrays on the device, and how often XLA compiled."""
    most, compiled, f = 0, [], with_loopax(step_of(64))
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    for index, _ in lx.lanes_stream(f, many(items), num_lanes=LANES):
        if index % 500 == 0:
            most = max(most, sum(x.nbytes for x in jax.live_arrays()))
    count = sum(event.endswith("backend_compile_duration") for event in compiled)
    print(peak_memory(), most, count)


if __name__ == "__main__":
    one_process(int(sys.argv[1]))
