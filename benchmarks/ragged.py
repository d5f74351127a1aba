"""Lanes that take different numbers of steps: counts, real series, nested loops, and a queue of items."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import loopax as lx
from benchmarks import lanes
from benchmarks.counter import Counter
from benchmarks.groups import EQUINOX, Counts, Group, Target
from benchmarks.measure import Case
from benchmarks.short.programs import gated_unit

PLAID = Path(__file__).parent.parent / "examples" / "data" / "plaid.npz"

LAX, ONE_BY_ONE = "vmapped lax.while_loop", "lax.map, one lane at a time"
LOCKSTEP, LOCKSTEP_WHILE = "loopax lockstep", "loopax lockstep, while_loop"
GROUPS, STAGES = "loopax compact, fori_loop", "loopax compact, while_loop"
STAGES_2, QUEUE = "loopax Compact(shrink=2), while_loop", "loopax lanes_map, 128 lanes"
VMAPPED_EQUINOX = f"{EQUINOX} under vmap"


def trip_counts() -> dict[str, Array]:
    """The numbers of steps of 1024 lanes."""
    random = np.random.RandomState(0)
    exponential = np.clip(np.ceil(random.exponential(100, 1024)), 1, lanes.BOUND)
    return {
        "log-normal counts": lanes.log_normal_counts(),
        "exponential counts": jnp.asarray(exponential, jnp.int32),
        "uniform counts": jnp.asarray(random.randint(1, 401, 1024), jnp.int32),
        "equal counts": jnp.full(1024, 100, jnp.int32),
    }


def lane_with_fori(how: lx.Lanes) -> Callable[..., Array]:
    """One lane whose number of steps is known at the start."""

    def lane(weights: Any, y: Array, n: Array) -> Array:
        body = lambda _, y: lanes.step(weights, y)
        kind = lx.Checkpointed()
        last = lx.fori_loop(0, n, body, y, max_steps=lanes.BOUND, throw=False, kind=kind, lanes=how)
        return (last**2).sum()

    return lane


def lane_with_while(how: lx.Lanes) -> Callable[..., Array]:
    """One lane whose number of steps is not known at the start."""

    def lane(weights: Any, y: Array, n: Array) -> Array:
        body = lambda c: (lanes.step(weights, c[0]), c[1] + 1)
        goes_on, start, kind = lambda c: c[1] < n, (y, jnp.int32(0)), lx.Checkpointed()
        last, _ = lx.while_loop(goes_on, body, start, max_steps=lanes.BOUND, throw=False, kind=kind, lanes=how)
        return (last**2).sum()

    return lane


def lane_with_lax(weights: Any, y: Array, n: Array) -> Array:
    """One lane, without reverse mode."""
    body = lambda c: (lanes.step(weights, c[0]), c[1] + 1)
    last, _ = lax.while_loop(lambda c: c[1] < n, body, (y, jnp.int32(0)))
    return (last**2).sum()


def vmapped(lane: Callable[..., Array]) -> Callable[..., Array]:
    """All lanes."""
    return jax.vmap(lane, (None, 0, 0))


def queued(weights: Any, y: Array, n: Array) -> Array:
    """All lanes through 128."""
    lane = lane_with_fori(lx.Lockstep())
    return lx.lanes_map(lambda item: lane(weights, *item), (y, n), num_lanes=128)


def one_by_one(weights: Any, y: Array, n: Array) -> Array:
    """All lanes, one after the other."""
    return lax.map(lambda item: lane_with_lax(weights, *item), (y, n))


LANES: dict[str, Callable[..., Array]] = {
    LOCKSTEP: lane_with_fori(lx.Lockstep()),
    GROUPS: lane_with_fori(lx.Compact()),
    STAGES: lane_with_while(lx.Compact()),
    STAGES_2: lane_with_while(lx.Compact(shrink=2)),
}


def of_counts(name: str, n: Array, forward: float, gradient: float) -> list[Group]:
    """Forward and the gradient of shared weights."""
    starts = jnp.asarray(np.random.RandomState(1).randn(1024, 16), jnp.float32)
    arguments = (lanes.weights(), starts, n)
    programs = {LAX: vmapped(lane_with_lax), ONE_BY_ONE: one_by_one, QUEUE: queued}
    programs |= {key: vmapped(lane) for key, lane in LANES.items()}
    values = Group(
        f"1024 lanes, {name}: forward",
        [Case(key, program, arguments) for key, program in programs.items()],
        [Target("time", GROUPS, LAX, forward), Target("time", STAGES_2, LAX, forward)],
        rounds=9,
    )
    differentiated = {VMAPPED_EQUINOX: vmapped(lanes.lane_with_equinox), QUEUE: queued}
    differentiated |= {key: vmapped(lane) for key, lane in LANES.items()}
    differentiated[LOCKSTEP_WHILE] = vmapped(lane_with_while(lx.Lockstep()))
    gradients = Group(
        f"1024 lanes, {name}: gradient of shared weights",
        [Case(key, gradient_of(program), arguments) for key, program in differentiated.items()],
        [
            *(Target("time", key, VMAPPED_EQUINOX, gradient) for key in (GROUPS, STAGES_2)),
            *(Target("temporary memory", key, VMAPPED_EQUINOX, 0.2, "temporary_mib") for key in (GROUPS, STAGES)),
            Target("trace and compile", GROUPS, LOCKSTEP, 4.5, "compile_seconds"),
            Target("trace and compile", STAGES, LOCKSTEP_WHILE, 4.5, "compile_seconds"),
            Target("time", LOCKSTEP, VMAPPED_EQUINOX, 0.5),
            Target("temporary memory", LOCKSTEP, VMAPPED_EQUINOX, 0.2, "temporary_mib"),
            Target("trace and compile", LOCKSTEP, VMAPPED_EQUINOX, 1.0, "compile_seconds"),
        ],
        rounds=5,
        compilations=2,
    )
    return [values, gradients]


def gradient_of(program: Callable[..., Array]) -> Callable[..., Any]:
    """With respect to the weights that all lanes share."""
    return jax.grad(lambda weights, y, n: program(weights, y, n).sum())


BATCH = 256


def recordings() -> tuple[Array, Array, Array]:
    """The recordings in batches, filled up with zeros to the longest of all; their lengths and kinds."""
    with np.load(PLAID) as file:
        values, lengths, labels = file["values"], file["lengths"], file["labels"]
    rows = np.zeros((len(lengths), lengths.max(), 1), np.float32)
    rows[np.arange(lengths.max()) < lengths[:, None]] = values / values.std()
    chosen = np.random.RandomState(0).permutation(len(lengths))
    chosen = np.concatenate([chosen, chosen[: -len(chosen) % BATCH]]).reshape(-1, BATCH)
    return jnp.asarray(rows[chosen]), jnp.asarray(lengths[chosen]), jnp.asarray(labels[chosen] - labels.min())


def epoch(scan: Callable[..., Array]) -> Callable[..., Any]:
    """One epoch of gradient steps of a recurrent classifier."""

    def loss(weights: Any, rows: Array, lengths: Array, labels: Array) -> Array:
        states = jax.vmap(scan, (None, 0, 0))(weights[:2], rows, lengths)
        scores = jax.nn.log_softmax(states @ weights[2])
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    def step(weights: Any, batch: Any) -> Any:
        gradient = jax.grad(loss)(weights, *batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), None

    return lambda weights, *batches: lax.scan(step, weights, batches)[0]


def _cell(weights: Any, h: Array, x: Array) -> Array:
    return gated_unit(weights, h[None], x[None])[0]


def _start(weights: Any) -> Array:
    return jnp.zeros(len(weights[1]))


def masked_scan(weights: Any, rows: Array, length: Array) -> Array:
    """All rows, and the old state where they are not the recording's own."""

    def step(h: Array, row: Any) -> Any:
        i, x = row
        return jnp.where(i < length, _cell(weights, h, x), h), None

    return lax.scan(step, _start(weights), (jnp.arange(len(rows)), rows))[0]


def masked_scan_of_checkpoints(weights: Any, rows: Array, length: Array) -> Array:
    """The same, storing every state and not what every step computes."""

    @jax.checkpoint
    def step(h: Array, row: Any) -> Any:
        i, x = row
        return jnp.where(i < length, _cell(weights, h, x), h), None

    return lax.scan(step, _start(weights), (jnp.arange(len(rows)), rows))[0]


def ragged_scan(how: lx.Lanes) -> Callable[..., Array]:
    """The recording's own rows."""
    step = lambda weights: lambda h, x: (_cell(weights, h, x), None)
    return lambda weights, rows, n: lx.scan(step(weights), _start(weights), rows, n, lanes=how, throw=False)[0]


def real_series(hidden: int, bound: float | None) -> Group:
    """Appliance recordings of 100 to 1344 samples."""
    random = np.random.RandomState(0)
    shapes = [(1, 3 * hidden), (hidden, 3 * hidden), (hidden, 11)]
    weights = [jnp.asarray(0.2 * random.randn(*shape), jnp.float32) for shape in shapes]
    programs = {
        "padded and masked lax.scan": masked_scan,
        "padded and masked lax.scan of jax.checkpoint": masked_scan_of_checkpoints,
        "loopax lockstep": ragged_scan(lx.Lockstep()),
        "loopax compact": ragged_scan(lx.Compact()),
    }
    cases = [Case(key, epoch(scan), (weights, *recordings())) for key, scan in programs.items()]
    targets = [Target("time", "loopax compact", "padded and masked lax.scan", bound)] if bound else []
    title = f"PLAID: one epoch of a GRU with {hidden} states, 1074 recordings in batches of {BATCH}"
    return Group(title, cases, targets, rounds=3)


SAMPLES, FEATURES, OBSERVATIONS = 50, 8, 1024


def log_posterior(observations: int) -> Callable[[Array], Array]:
    """Of a logistic regression."""
    random = np.random.RandomState(0)
    inputs = jnp.asarray(random.randn(observations, FEATURES), jnp.float32)
    signs = jnp.sign(inputs @ jnp.ones(FEATURES) + jnp.asarray(random.randn(observations), jnp.float32))
    return lambda w: jax.nn.log_sigmoid(signs * (inputs @ w)).sum() - 0.5 * (w**2).sum()


def slice_steps(observations: int) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[Array], Array]]:
    """To begin an interval, to shrink one until a point in it is likely enough (Neal 2003), and the density."""
    log_density = log_posterior(observations)

    def shrink(state: Any, key: Array) -> Any:
        low, high, origin, direction, level, *_ = state
        at = jax.random.uniform(key, minval=low, maxval=high)
        low, high = jnp.where(at < 0, at, low), jnp.where(at < 0, high, at)
        point = origin + at * direction
        density = log_density(point)
        return low, high, origin, direction, level, point, density, density > level

    def begin(x: Array, density: Array, key: Array) -> Any:
        keys = jax.random.split(key, 4)
        direction = jax.random.normal(keys[0], x.shape)
        level = density + jnp.log(jax.random.uniform(keys[1], minval=1e-7))
        low = -20.0 * jax.random.uniform(keys[2])
        return (low, low + 20.0, x, direction, level, x, density, jnp.zeros((), bool)), keys[3]

    return begin, shrink, log_density


def slice_sampler(how: lx.Lanes, observations: int = OBSERVATIONS) -> Callable[..., Any]:
    """A chain of slice sampling."""
    begin, shrink, log_density = slice_steps(observations)

    def sample(carry: Any, _: Any, key: Array) -> Any:
        start, own = begin(*carry, key)
        state, info = lx.while_loop(lambda s: ~s[-1], shrink, start, key=own, info=True)
        return (state[5], state[6]), (state[5], info.num_steps)

    return lambda key, x: lx.scan(sample, (x, log_density(x)), None, SAMPLES, key=key, lanes=how)


class Chain(NamedTuple):
    """Where a chain is, in a sampler that is written as a state machine."""

    sample: Array  # its number
    shrinks: Array  # how often the interval of this sample has shrunk; -1: it is to begin
    interval: Any  # as `slice_sampler` carries it
    key: Array
    rows: Array
    steps: Array


def state_machine(observations: int) -> Callable[..., Any]:
    """These chains by hand: an iteration shrinks all intervals, and begins samples where a chain is to begin one."""
    begin, shrink, log_density = slice_steps(observations)

    def entered(chain: Chain, key: Array) -> Chain:
        interval, own = begin(chain.interval[5], chain.interval[6], jax.random.fold_in(key, chain.sample))
        return chain._replace(shrinks=jnp.int32(0), interval=interval, key=own)

    def shrunk(chain: Chain) -> Chain:
        interval = shrink(chain.interval, jax.random.fold_in(chain.key, chain.shrinks))
        found, count = interval[-1], chain.shrinks + 1
        here = (jnp.arange(SAMPLES) == chain.sample) & found
        return Chain(
            chain.sample + found,
            jnp.where(found, -1, count),
            interval,
            chain.key,
            jnp.where(here[:, None], interval[5], chain.rows),
            jnp.where(here, count, chain.steps),
        )

    def chosen(which: Array, new: Any, old: Any) -> Any:
        pick = lambda a, b: jnp.where(which.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
        return jax.tree.map(pick, new, old)

    def iteration(keys: Array, chains: Chain) -> Chain:
        begins = (chains.shrinks < 0) & (chains.sample < SAMPLES)
        begun = lambda chains: chosen(begins, jax.vmap(entered)(chains, keys), chains)
        chains = lax.cond(begins.any(), begun, lambda chains: chains, chains)
        return chosen(chains.sample < SAMPLES, jax.vmap(shrunk)(chains), chains)

    def sampled(keys: Array, xs: Array) -> Any:
        density, zero = jax.vmap(log_density)(xs), jnp.zeros(len(keys))
        interval = (zero, zero, xs, xs, zero, xs, density, zero > 0)
        count, rows = jnp.zeros(len(keys), jnp.int32), jnp.zeros((len(keys), SAMPLES, FEATURES))
        start = Chain(count, count - 1, interval, keys, rows, jnp.zeros(rows.shape[:2], jnp.int32))
        last = lax.while_loop(lambda chains: (chains.sample < SAMPLES).any(), partial(iteration, keys), start)
        return (last.interval[5], last.interval[6]), (last.rows, last.steps)

    return sampled


def sampler_arguments() -> tuple[Any, ...]:
    """256 chains."""
    keys = jax.random.split(jax.random.key(0), 256)
    return keys, jnp.asarray(np.random.RandomState(0).randn(256, FEATURES), jnp.float32)


def nested(observations: int, bound: float) -> Group:
    """256 chains of slice sampling; what a chain does between inner loops costs as much as 100 observations."""
    ways = {"loopax lockstep": lx.Lockstep(), "loopax free": lx.Free()}
    programs = {key: jax.vmap(slice_sampler(how, observations)) for key, how in ways.items()}
    programs["a state machine by hand"] = state_machine(observations)
    cases = [Case(key, program, sampler_arguments()) for key, program in programs.items()]
    targets = [
        Target("time", "loopax free", "loopax lockstep", bound),
        Target("time", "loopax free", "a state machine by hand", 1.1),
    ]
    title = f"256 chains of slice sampling, {SAMPLES} samples, {observations} observations"
    return Group(title, cases, targets, rounds=9)


def heavy_tailed(*shape: int) -> Array:
    """Numbers of steps from 0 to 40, most of them small."""
    return jnp.asarray(np.minimum(np.random.RandomState(0).pareto(1.0, shape) * 2, 40), jnp.int32)


def deep(how: lx.Lanes) -> Callable[..., Array]:
    """A lane of three loops in each other: an MLP is applied as often as the middle loop says, in each outer step."""

    def lane(weights: Any, y: Array, counts: Array) -> Array:
        def middle(y: Array, n: Array) -> Any:
            return lx.fori_loop(0, n, lambda _, y: lanes.step(weights, y), y, max_steps=40), None

        def outer(y: Array, row: Array) -> Any:
            return lx.scan(middle, y, row[1:], row[0] % row.size)[0], None

        return (lx.scan(outer, y, counts, lanes=how)[0] ** 2).sum()

    return lane


def three_levels() -> list[Group]:
    """64 lanes whose numbers of steps differ at each level."""
    starts = jnp.asarray(np.random.RandomState(1).randn(64, 16), jnp.float32)
    arguments = (lanes.weights(), starts, heavy_tailed(64, 10, 9))
    programs = {"loopax lockstep": vmapped(deep(lx.Lockstep())), "loopax free": vmapped(deep(lx.Free()))}
    kinds = {"forward": (lambda f: f, 0.4), "gradient of shared weights": (gradient_of, 0.5)}
    return [
        Group(
            f"64 lanes of three loops in each other, counts of heavy tail: {what}",
            [Case(key, of(program), arguments) for key, program in programs.items()],
            [Target("time", "loopax free", "loopax lockstep", bound)],
            rounds=5,
        )
        for what, (of, bound) in kinds.items()
    ]


def wide_network(how: lx.Lanes, counter: Callable[[Array], Any] = lambda x: 0.0) -> Callable[..., Array]:
    """A lane of two loops in each other, around a network whose step costs much."""

    def lane(weights: Any, y: Array, counts: Array) -> Array:
        def inner(_: Array, y: Array) -> Array:
            h = y
            for w in weights:
                h = jnp.tanh(h @ w)
            return y + 0.1 * h + 0.0 * counter(y[0])

        outer = lambda y, n: (0.9 * lx.fori_loop(0, n, inner, y, max_steps=40), None)
        return (lx.scan(outer, y, counts, lanes=how)[0] ** 2).sum()

    return lane


def wide_arguments(size: int) -> tuple[Any, ...]:
    """So many lanes."""
    random = np.random.RandomState(0)
    weights = [jnp.asarray(0.1 * random.randn(*shape), jnp.float32) for shape in ((16, 256), (256, 256), (256, 16))]
    return weights, jnp.asarray(random.randn(size, 16), jnp.float32), heavy_tailed(size, 30)


def gathered() -> Group:
    """Free lanes whose steps are gathered."""
    programs = {
        "loopax lockstep": vmapped(wide_network(lx.Lockstep())),
        "loopax free": vmapped(wide_network(lx.Free())),
    }
    return Group(
        "128 lanes of two loops around a network with 256 units, counts of heavy tail: forward",
        [Case(key, program, wide_arguments(128)) for key, program in programs.items()],
        [Target("time", "loopax free", "loopax lockstep", 0.4)],
        rounds=9,
    )


def gathered_evaluations() -> dict[str, Any]:
    """Of the network, lane by lane: free lanes are gathered in batches of 16."""
    counter, (weights, starts, counts) = Counter(), wide_arguments(224)
    batches = counter.of(jax.jit(vmapped(wide_network(lx.Free(), counter))), weights, starts, counts)
    needed = int(counts.sum())
    return {"evaluated": 16 * batches, "needed": needed, "evaluated / needed": 16 * batches / needed}


def nested_iterations() -> dict[str, Any]:
    """Batched iterations of the same."""
    _, (_, steps) = jax.jit(jax.vmap(slice_sampler(lx.Lockstep())))(*sampler_arguments())
    report = lx.lane_report(np.full(256, SAMPLES), steps)
    assert report.nested is not None
    assert report.free is not None
    return {
        "lockstep": report.nested.iterations,
        "free": report.free.iterations,
        "outer part, free": report.free.evaluations[-1],
        "most inner steps of a chain": int(steps.sum(1).max()),
        "lockstep / free": report.nested.iterations / report.free.iterations,
    }


def series_steps() -> dict[str, Any]:
    """Steps of the recurrent cell, forward, in an epoch of the real series."""
    _, lengths, _ = recordings()
    reports = [lx.lane_report(batch) for batch in lengths]
    padded = lengths.size * int(lengths.max())
    compact = sum(s.lane_steps for report in reports for s in report.groups)
    return {"padded": padded, "compact": compact, "useful": int(lengths.sum()), "padded / compact": padded / compact}


def groups() -> list[Group]:
    """All tables."""
    bounds = {"log-normal counts": (1 / 9, 1 / 16), "exponential counts": (1 / 6, 1 / 8)}
    bounds |= {"uniform counts": (0.65, 0.42), "equal counts": (1.05, 0.6)}
    return [
        *(group for name, n in trip_counts().items() for group in of_counts(name, n, *bounds[name])),
        real_series(64, 1 / 3),
        real_series(32, None),
        real_series(128, None),
        nested(OBSERVATIONS, 1 / 1.5),
        nested(OBSERVATIONS // 64, 1.0),
        *three_levels(),
        gathered(),
    ]


def counts() -> list[Counts]:
    """What is counted once."""
    return [
        Counts("256 chains of slice sampling: batched iterations", nested_iterations),
        Counts("224 lanes of two loops around a network: evaluations of the step", gathered_evaluations),
        Counts("PLAID: steps of the cell in one epoch, forward", series_steps),
    ]
