"""What computes for a lane from other lanes: draws with keys of rbg, and rules of `custom_vmap`.

The reference is a `lax.scan` of all rows that keeps the carry of a finished lane: JAX's own batch of such a loop.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.problem import argument_of

ROWS = 4
IMPLS = ["rbg", "unsafe_rbg"]
KINDS = {
    "auto": "auto",
    "checkpointed": lx.Checkpointed(2),
    "bounded": lx.Bounded(),
    "residuals": lx.Residuals(),
    "truncated": lx.Truncated(last=ROWS),
}
LANES = {"lockstep": "lockstep", "compact": lx.Compact(min_lanes=1), "auto": "auto"}
# The first lane, with whose key JAX draws, ends first.
LENGTHS = np.array([1, 4, 3], np.int32)


def keys(impl):
    return jax.random.split(jax.random.key(3, impl=impl), 3)


# ---- steps that draw: (weight, x, row's number, key, carried key, row) -> (x, next carried key)


def by_argument(w, x, i, key, carried, row):
    return jnp.sin(w * x) + jax.random.normal(jax.random.fold_in(key, i)), carried


def by_carry(w, x, i, key, carried, row):
    own, carried = jax.random.split(carried)
    return w * x + jax.random.normal(own), carried


def by_row(w, x, i, key, carried, row):
    return w * x * jax.random.uniform(row), carried


STEPS = {f.__name__: f for f in (by_argument, by_carry, by_row)}


def of_loopax(step, scan=lx.scan, **options):
    def lane(w, key, rows, n):
        def body(c, given):
            i, row = given
            return step(w, c[0], i, key, c[1], row), None

        xs = jnp.arange(ROWS, dtype=jnp.int32), rows
        return scan(body, (0.5, key), xs, length=n, **options)[0][0]

    return lane


def scan_of_lax(body, init, xs, length):
    """Of all rows, which keeps what a finished lane has."""

    def step(c, given):
        (x, carried), _ = body(c, given)
        takes = given[0] < length
        data = jnp.where(takes, jax.random.key_data(carried), jax.random.key_data(c[1]))
        return (jnp.where(takes, x, c[0]), jax.random.wrap_key_data(data, impl=jax.random.key_impl(carried))), None

    return lax.scan(step, init, xs)


def of_lax(step):
    return of_loopax(step, scan_of_lax)


def same(compute, *lanes):
    """What both lanes give, each compiled."""
    found, expected = (jax.jit(lambda lane=lane: compute(lane))() for lane in lanes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-12), found, expected)


def values_and_derivatives(lane, impl):
    """In every order of batch and derivative."""
    given = keys(impl), jax.vmap(lambda k: jax.random.split(k, ROWS))(keys(impl)), LENGTHS
    batch = lambda w: jax.vmap(lambda *lane_given: lane(w, *lane_given))(*given)
    total = lambda w: batch(w).sum()
    of_lanes = jax.vmap(jax.value_and_grad(lane), in_axes=(None, 0, 0, 0))
    of_lanes_forward = jax.vmap(lambda *g: jax.jvp(lambda w: lane(w, *g), (0.7,), (1.0,)))
    return jax.jit(
        lambda w: {
            "value": batch(w),
            "of grad of vmap": jax.value_and_grad(total)(w),
            "of vmap of grad": of_lanes(w, *given),
            "forward": jax.jvp(batch, (w,), (1.0,)),
            "of vmap of jvp": of_lanes_forward(*given),
        }
    )(0.7)


@cache
def expected_derivatives(step, impl):
    return values_and_derivatives(of_lax(STEPS[step]), impl)


# Each of them compiles five programs; those that take seconds are slow tests. Kinds and lanes meet in no rule here.
FAST = [("by_argument", "unsafe_rbg"), ("by_carry", "rbg"), ("by_row", "rbg")]
CASES = [
    pytest.param(step, impl, "auto", "lockstep", marks=() if (step, impl) in FAST else pytest.mark.slow)
    for step in STEPS
    for impl in IMPLS
]
CASES += [("by_carry", "rbg", kind, "compact") for kind in KINDS]
CASES += [pytest.param("by_carry", "rbg", kind, "auto", marks=pytest.mark.slow) for kind in ("bounded", "truncated")]


@pytest.mark.parametrize(("step", "impl", "kind", "lanes"), CASES)
def test_draws_are_those_of_jax(step, impl, kind, lanes):
    got = values_and_derivatives(of_loopax(STEPS[step], **argument_of(KINDS[kind]), lanes=LANES[lanes]), impl)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9), got, expected_derivatives(step, impl))


@pytest.mark.parametrize("lanes", ["compact", "auto"])
@pytest.mark.parametrize("kind", ["checkpointed", "truncated"])
def test_a_sweep_draws_what_its_loop_has_drawn(kind, lanes):
    """Though no state depends on the draws, so that the loop of the states draws nothing."""

    def lane(w, key, n, **options):
        def body(i, c):
            x, y = c
            return jnp.sin(w * x), 0.9 * y + x * w * jax.random.normal(jax.random.fold_in(key, i))

        return lx.fori_loop(0, n, body, (0.5, 0.0), max_steps=ROWS, **options)[1]

    def slopes(how):
        options = {**argument_of(KINDS[kind]), "lanes": LANES[how]}
        return jax.vmap(jax.grad(partial(lane, **options)), (None, 0, 0))(0.7, keys("rbg"), LENGTHS)

    same(slopes, lanes, "lockstep")


def drawn(w, x, data):
    """A draw with the bits of a key that is carried."""
    carried, use = jax.random.split(jax.random.wrap_key_data(data, impl="rbg"))
    return jnp.cos(w * x + jax.random.normal(use, (2,))), jax.random.key_data(carried)


def masked_steps(n, most, step, c, reverse=False):
    """What a loop of n steps gives, as JAX's batch of it."""
    kept = lambda is_taken, new, old: jax.tree.map(lambda a, b: jnp.where(is_taken, a, b), new, old)
    rows = jnp.arange(most, dtype=jnp.int32)
    return lax.scan(lambda c, i: (kept(i < n, step(c), c), None), c, rows, reverse=reverse)[0]


def counted(while_loop, **options):
    def run(n, step, c):
        return while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, step(c[1])), (jnp.int32(0), c), **options)[1]

    return run


def test_lanes_of_other_keys_leave_their_batch():
    """Threefry draws for each lane with its own key."""
    lane = of_loopax(by_argument, lanes=LANES["compact"])
    given = keys("threefry2x32"), jax.vmap(lambda k: jax.random.split(k, ROWS))(keys("threefry2x32")), LENGTHS
    batch = jax.make_jaxpr(lambda w: jax.vmap(lambda *g: lane(w, *g))(*given))(0.7)
    assert any(eqn.primitive.name == "compact_vmap" for eqn in batch.jaxpr.eqns)


# ---- custom_vmap


def custom(rule):
    """An identity, with this rule for lanes."""
    function = jax.custom_batching.custom_vmap(lambda x: x)
    function.def_vmap(lambda size, batched, x: (rule(x), True))
    return function


WEIGHT = np.array([[0.3, -0.2], [0.1, 0.4]])
MIXING = {
    "mean": lambda x: x - x.mean(0, keepdims=True),
    "sort": lambda x: jnp.sort(x, 0),
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "product of lanes": lambda x: x @ x.T @ x,
    "scan over lanes": lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(2), x)[1],
    "mean in a loop": lambda x: lax.fori_loop(0, 2, lambda _, x: x - x.mean(0, keepdims=True), x),
    "mean in a branch": lambda x: lax.cond(x.shape[1] > 1, lambda x: x - x.mean(0, keepdims=True), lambda x: x, x),
    "largest decides": lambda x: lax.cond(jnp.max(x) > 1, jnp.sin, jnp.cos, x),
}
KEEPING = {
    "sine": jnp.sin,
    "product": lambda x: jnp.tanh(x @ WEIGHT),
    "sum of each": lambda x: x - x.sum(1, keepdims=True),
    "transposed twice": lambda x: jnp.sin(x.T).T,
    "map over lanes": lambda x: lax.map(lambda row: row / row.sum(), x),
    "loop": lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.sin(x) + 1.0, x),
    "branch": lambda x: lax.cond(x.shape[1] > 1, jnp.sin, jnp.cos, x),
    "checkpoint": jax.checkpoint(jnp.sin),
}


def with_custom_vmap(function, **options):
    def lane(w, x, n):
        return lx.fori_loop(0, n, lambda i, x: jnp.cos(w * function(x)), x, max_steps=ROWS, **options)

    return lane


def as_masked_scan(function):
    return lambda w, x, n: masked_steps(n, ROWS, lambda x: jnp.cos(w * function(x)), x)


STARTS = np.array([[0.3, -0.5], [0.8, 0.1], [-0.4, 0.6]])


def value_and_slope(lane):
    batch = jax.jit(lambda w: jax.vmap(lambda *g: lane(w, *g))(STARTS, LENGTHS))
    return batch(0.7), jax.jvp(batch, (0.7,), (1.0,))


def leaves_its_batch(lane):
    batch = jax.make_jaxpr(lambda w: jax.vmap(lambda *g: lane(w, *g))(STARTS, LENGTHS))(0.7)
    return any(eqn.primitive.name == "compact_vmap" for eqn in batch.jaxpr.eqns)


@pytest.mark.parametrize("rule", [*MIXING, *KEEPING])
def test_rules_that_mix_lanes_run_in_lockstep_and_others_do_not(rule):
    function = custom((MIXING | KEEPING)[rule])
    lane = with_custom_vmap(function, lanes=LANES["compact"])
    assert leaves_its_batch(lane) == (rule in KEEPING)
    jax.tree.map(np.testing.assert_allclose, value_and_slope(lane), value_and_slope(as_masked_scan(function)))


def reads(c):
    """A step that reads an array of the carry where a number of the lane says."""
    x, rows, k = c
    return 0.5 * x + rows[k], rows, k + 1


def reads_and_writes(c):
    x, rows, k = c
    return 0.5 * x + rows[k], rows.at[k + 1].set(x), k + 1


def writes_and_reads(c):
    x, rows, k = c
    rows = rows.at[k + 1].set(x)
    return 0.5 * x + rows[k + 1] + rows[k], rows, k + 1


@pytest.mark.parametrize("step", [reads, reads_and_writes, writes_and_reads])
@pytest.mark.parametrize("size", [8, 3000])
def test_other_lanes_see_a_finished_lane_at_its_own_place(step, size):
    """Also in an array that is large, and stays with its lane."""
    function = custom(MIXING["mean"])

    def mixed(w, c):
        x, *rest = step(c)
        return (jnp.cos(w * function(x)), *rest)

    def start(x):
        return x, jnp.outer(jnp.sin(jnp.arange(float(size))), x), jnp.int32(1)

    lane = lambda w, x, n: lx.fori_loop(0, n, lambda i, c: mixed(w, c), start(x), max_steps=ROWS)[0]
    reference = lambda w, x, n: masked_steps(n, ROWS, partial(mixed, w), start(x))[0]
    jax.tree.map(np.testing.assert_allclose, value_and_slope(lane), value_and_slope(reference))


@pytest.mark.parametrize("order", ["reads", "reads and writes", "in an inner loop", "writes and reads"])
def test_other_lanes_see_what_a_finished_lane_has_in_its_buffer(order):
    function = custom(MIXING["mean"])

    def mixed(w, x, row):
        return jnp.cos(w * function(0.5 * x + row))

    def with_buffer(w, x, n):
        def body(i, c):
            x, buffer = c
            if order == "in an inner loop":
                new, buffer = lx.fori_loop(0, 2, lambda _, c: (mixed(w, c[0], c[1][-1]), c[1]), c)
                return new, buffer.append(x)
            if order == "writes and reads":
                buffer = buffer.append(x)
            x = mixed(w, x, buffer[-1])
            return x, buffer.append(x) if order == "reads and writes" else buffer

        buffer = lx.Buffer(2 * ROWS, like=x).append(x + 1.0)
        return lx.fori_loop(0, n, body, (x, buffer), max_steps=ROWS)[0]

    def with_row(w, x, n):
        """The newest row is all that is read."""

        def step(c):
            x, row = c
            if order == "in an inner loop":
                return mixed(w, mixed(w, x, row), row), x
            x = mixed(w, x, row)
            return x, x if order == "reads and writes" else row

        return masked_steps(n, ROWS, step, (x, x + 1.0))[0]

    if order == "writes and reads":
        with pytest.raises(NotImplementedError, match="Use what is written, not what is read"):
            value_and_slope(with_buffer)
    else:
        jax.tree.map(np.testing.assert_allclose, value_and_slope(with_buffer), value_and_slope(with_row))


# ---- where batches change


def drawn_again(carry):
    """A step whose derivative needs what it has drawn."""
    key, v = carry
    key, use = jax.random.split(key)
    v = 0.8 * v + 0.3 * jax.random.normal(use, (2,))
    return key, jnp.sin(v * v)


def drawn_at(key, i, v):
    v = 0.8 * v + 0.3 * jax.random.normal(jax.random.fold_in(key, i), (2,))
    return jnp.sin(v * v)


AGAIN = {
    "as it is": lambda f: f,
    "checkpoint": jax.checkpoint,
    "policy": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
}
DRAWN_AGAIN = [
    *((kind, "as it is") for kind in ("bounded", "residuals", lx.Checkpointed(2), lx.Truncated(last=4))),
    *((kind, "checkpoint") for kind in ("residuals", lx.Checkpointed(2), lx.Truncated(last=4))),
    ("bounded", "policy"),
    pytest.param("residuals", "policy", marks=pytest.mark.slow),
]


def three_lanes():
    """Starts, numbers of steps and keys."""
    return jnp.arange(6.0).reshape(3, 2) / 9, jnp.array([1, 3, 4]), jax.random.split(jax.random.key(3, impl="rbg"), 3)


@cache
def gradient_of_masked_steps():
    starts, counts, keys = three_lanes()

    def masked(v):
        data, w = jax.random.key_data(keys), v
        for i in range(4):
            key, new = jax.vmap(drawn_again)((jax.random.wrap_key_data(data, impl="rbg"), v))
            takes = (i < counts)[:, None]
            data, v = jnp.where(takes, jax.random.key_data(key), data), jnp.where(takes, new, v)
            w = jnp.where(takes, jax.vmap(drawn_at, (0, None, 0))(keys, i, w), w)
        return v.sum() + w.sum()

    return jax.jit(jax.grad(masked))(starts)


@pytest.mark.parametrize(("kind", "wrap"), DRAWN_AGAIN, ids=str)
def test_a_batch_of_gradients_evaluates_steps_with_the_numbers_that_they_drew(kind, wrap):
    """A step is evaluated again for all lanes together, also where the first of them has finished."""
    starts, counts, keys = three_lanes()

    def lane(v, n, key):
        """The key in the carry, and the key of all steps."""
        again, at = AGAIN[wrap](drawn_again), AGAIN[wrap](drawn_at)
        carried = lx.fori_loop(0, n, lambda _, c: again(c), (key, v), max_steps=4, **argument_of(kind))[1]
        return carried.sum() + lx.fori_loop(0, n, lambda i, v: at(key, i, v), v, max_steps=4, **argument_of(kind)).sum()

    of_batch = jax.grad(lambda v: jax.vmap(lane)(v, counts, keys).sum())
    for got in (jax.jit(jax.vmap(jax.grad(lane)))(starts, counts, keys), jax.jit(of_batch)(starts)):
        np.testing.assert_allclose(got, gradient_of_masked_steps(), rtol=1e-12)


BOUNDED, COMPACT = {"max_steps": ROWS}, {"max_steps": ROWS, "lanes": LANES["compact"]}
SLOW_LAST = [(1, {}), (3, BOUNDED), (3, COMPACT), (4, {})]
LAST = [(1, BOUNDED), (2, BOUNDED), (2, {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_LAST)]


@pytest.mark.parametrize(("last", "options"), LAST)
def test_the_last_steps_of_lanes_that_end_at_different_times(last, options):
    """A lane's last steps take from other lanes what these had at the same steps, with the derivative of their last."""
    kind = lx.Residuals() if "max_steps" in options else lx.Checkpointed(2)
    less_mean = custom(MIXING["mean"])

    def step(w, x, i, key):
        return jnp.cos(w * less_mean(x)) + jax.random.normal(jax.random.fold_in(key, i), (2,))

    def of_loopax(w, x, n, key):
        return lx.fori_loop(
            0, n, lambda i, x: step(w, x, i, key), x, kind=kind, derivative=lx.Truncated(last=last), **options
        )

    def masked(w, x, n, key):
        def body(x, i):
            new = jnp.where(i < n, step(w, x, i, key), x)
            return jnp.where(i < n - last, lax.stop_gradient(new), new), None

        return lax.scan(body, x, jnp.arange(ROWS, dtype=jnp.int32))[0]

    def all_of(lane):
        batch = lambda w, x: jax.vmap(lane, (None, 0, 0, 0))(w, x, LENGTHS, keys("rbg"))
        total = lambda w, x: jnp.sin(batch(w, x)).sum()
        starts = jnp.asarray(STARTS)
        forward = jax.jvp(batch, (0.7, starts), (1.0, starts))
        return forward, jax.grad(total, (0, 1))(0.7, starts), jax.hessian(total)(0.7, starts)

    same(all_of, of_loopax, masked)


@pytest.mark.parametrize("finite", [None, "nan"])
def test_a_batch_of_gradients_of_checkpointed_steps_is_differentiated(finite):
    """Its loop saves carries, whatever its kind: lanes that have finished store no rows of residuals."""
    less_mean = custom(MIXING["mean"])

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("none"))
    def step(w, c):
        x, y = c
        x = 0.6 * w * x + 0.3 * less_mean(lax.stop_gradient(jnp.sin(x)))
        return x, y * jnp.cos(x)

    def of_loopax(w, x, n):
        return lx.fori_loop(0, n, lambda _, c: step(w, c), (x, x), max_steps=ROWS, finite=finite)[1].sum()

    def masked(w, x, n):
        return masked_steps(n, ROWS, partial(step, w), (x, x))[1].sum()

    def slope_of_slopes(lane):
        slopes = lambda w: jax.vmap(jax.value_and_grad(lane, (0, 1)), (None, 0, 0))(w, jnp.asarray(STARTS), LENGTHS)
        found, along = jax.linearize(slopes, 0.7)
        return found, along(1.0)

    same(slope_of_slopes, of_loopax, masked)


INNER = {
    "fori_loop": lambda m, step, c: lx.fori_loop(0, m, lambda j, c: step(c), c),
    "fori_loop with a bound": lambda m, step, c: lx.fori_loop(
        0, m, lambda j, c: step(c), c, max_steps=3, kind="residuals"
    ),
    "while_loop": counted(lx.while_loop),
    "while_loop of lax": counted(lax.while_loop),
}


def of_all_lanes(lane, w):
    """Of lanes that have lengths of their own, and so have their inner loops."""
    return jax.vmap(lane, (None, 0, 0, 0, 0))(
        w, jnp.asarray(STARTS), LENGTHS, np.array([1, 3, 2], np.int32), keys("rbg")
    )


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("mixing", ["key", "mean"])
def test_lanes_that_have_finished_keep_the_length_of_an_inner_loop(inner, mixing):
    """What other lanes see of a finished lane inside of the inner loop depends on how many steps that takes."""
    less_mean = custom(MIXING["mean"])
    step = drawn if mixing == "key" else lambda w, x, data: (jnp.cos(w * x) + jnp.sin(less_mean(x)), data)

    def lane(w, x, n, m, key):
        run = lambda c: INNER[inner](m, lambda c: step(w, *c), c)
        return lx.fori_loop(0, n, lambda i, c: run(c), (x, jax.random.key_data(key)), max_steps=ROWS)[0]

    def masked(w, x, n, m, key):
        run = lambda c: masked_steps(m, 3, lambda c: step(w, *c), c)
        return masked_steps(n, ROWS, run, (x, jax.random.key_data(key)))[0]

    def all_of(lane):
        batch = lambda w: of_all_lanes(lane, w)
        back = () if inner == "while_loop of lax" else jax.jacrev(batch)(0.7)
        return jax.jvp(batch, (0.7,), (1.0,)), back

    same(all_of, lane, masked)


def test_lanes_that_have_finished_keep_the_length_of_an_inner_pullback():
    """The inner loop has run before, and is walked back in each step."""

    def lane(run, w, x, n, m, key):
        pull = jax.vjp(lambda x: run(m, 3, lambda c: drawn(w, *c), (x, jax.random.key_data(key)))[0], x)[1]
        return lx.fori_loop(0, n, lambda i, ct: 1.0 + pull(ct)[0], jnp.ones(2), max_steps=ROWS)

    def run(m, most, step, c):
        return lx.fori_loop(0, m, lambda j, c: step(c), c, kind=lx.Checkpointed(1))

    same(lambda each: of_all_lanes(partial(lane, each), 0.7), run, masked_steps)
