"""What computes for a lane from other lanes: draws with keys of rbg, and rules of `custom_vmap`.

The reference is a `lax.scan` of all rows that keeps the carry of a finished lane: JAX's own batch of such a loop.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx

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


def by_raw_bits(w, x, i, key, carried, row):
    """The loop is given the bits of a key, and a number of its own to fold in."""
    key = jax.random.wrap_key_data(key, impl=jax.random.key_impl(row))
    return w * x + jax.random.normal(jax.random.fold_in(key, i + 1)), carried


def by_inner_loops(w, x, i, key, carried, row):
    def draw(x, key):
        return jnp.sin(x) + jax.random.normal(key), jax.random.key_data(key)[0]

    x, _ = lax.scan(draw, w * x, jax.random.split(jax.random.fold_in(key, i), 2))
    x = lax.cond(i % 2 == 0, lambda x: x + jax.random.normal(row), lambda x: 2 * x, x)
    return lax.fori_loop(0, 2, lambda j, x: x + jax.random.normal(jax.random.fold_in(row, j)), x), carried


def by_gamma(w, x, i, key, carried, row):
    """A square root: outside of its domain the gradient is not finite."""
    return jnp.sqrt(w * jnp.abs(x) + jax.random.gamma(jax.random.fold_in(key, i), 3.0)), carried


STEPS = {f.__name__: f for f in (by_argument, by_carry, by_row, by_raw_bits, by_inner_loops, by_gamma)}


def bits_or_key(step, key):
    return jax.random.key_data(key) if step is by_raw_bits else key


def of_loopax(step, **options):
    def lane(w, key, rows, n):
        given_key = bits_or_key(step, key)

        def body(c, given):
            i, row = given
            return step(w, c[0], i, given_key, c[1], row), None

        return lx.scan(body, (0.5, key), (jnp.arange(ROWS, dtype=jnp.int32), rows), length=n, **options)[0][0]

    return lane


def of_lax(step):
    def lane(w, key, rows, n):
        given_key = bits_or_key(step, key)

        def body(c, given):
            i, row = given
            x, carried = step(w, c[0], i, given_key, c[1], row)
            data = jnp.where(i < n, jax.random.key_data(carried), jax.random.key_data(c[1]))
            carried = jax.random.wrap_key_data(data, impl=jax.random.key_impl(carried))
            return (jnp.where(i < n, x, c[0]), carried), None

        return lax.scan(body, (0.5, key), (jnp.arange(ROWS, dtype=jnp.int32), rows))[0][0]

    return lane


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


# Each of them compiles five programs; those that take seconds are slow tests.
FAST = [("by_argument", "unsafe_rbg"), ("by_carry", "rbg"), ("by_raw_bits", "unsafe_rbg"), ("by_row", "rbg")]
CASES = [(step, impl) for step in STEPS for impl in IMPLS]


@pytest.mark.parametrize(
    ("step", "impl"), [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_draws_are_those_of_jax(step, impl):
    expected = values_and_derivatives(of_lax(STEPS[step]), impl)
    got = values_and_derivatives(of_loopax(STEPS[step]), impl)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9), got, expected)


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


ROW_NUMBERS = np.arange(ROWS)
EACH_LOOP = {
    "while_loop": counted(lx.while_loop),
    "while_loop with a bound": counted(lx.while_loop, max_steps=ROWS),
    "fori_loop": lambda n, step, c: lx.fori_loop(0, n, lambda _, c: step(c), c),
    "limits of lanes": lambda n, step, c: lx.fori_loop(n, 2 * n, lambda _, c: step(c), c, max_steps=ROWS),
    "reversed scan": lambda n, step, c: lx.scan(lambda c, _: (step(c), None), c, ROW_NUMBERS, length=n, reverse=True)[
        0
    ],
}


@pytest.mark.parametrize("loop", EACH_LOOP)
def test_each_loop_draws_as_a_masked_scan(loop):
    def masked(n, step, c):
        return masked_steps(n, ROWS, step, c, reverse=loop == "reversed scan")

    def all_of(run):
        lane = lambda w, x, n, key: run(n, lambda c: drawn(w, *c), (x, jax.random.key_data(key)))[0]
        batch = lambda w: jax.vmap(lane, (None, 0, 0, 0))(w, jnp.asarray(STARTS), LENGTHS, keys("rbg"))
        return jax.jvp(batch, (0.7,), (1.0,)), jax.jacrev(batch)(0.7)

    got, expected = jax.jit(lambda: all_of(EACH_LOOP[loop]))(), jax.jit(lambda: all_of(masked))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9), got, expected)


@pytest.mark.parametrize("lanes", ["compact", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lockstep", "auto"))])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_do_not_depend_on_kind_and_lanes(kind, lanes):
    expected = values_and_derivatives(of_lax(by_carry), "rbg")
    got = values_and_derivatives(of_loopax(by_carry, kind=KINDS[kind], lanes=LANES[lanes]), "rbg")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9), got, expected)


def test_lanes_of_other_keys_leave_their_batch():
    """Threefry draws for each lane with its own key."""
    lane = of_loopax(by_argument, lanes=LANES["compact"])
    given = keys("threefry2x32"), jax.vmap(lambda k: jax.random.split(k, ROWS))(keys("threefry2x32")), LENGTHS
    batch = jax.make_jaxpr(lambda w: jax.vmap(lambda *g: lane(w, *g))(*given))(0.7)
    assert any(eqn.primitive.name == "compact_vmap" for eqn in batch.jaxpr.eqns)


# ---- branches


@pytest.mark.parametrize("lanes", [*LANES, "sequential"])
def test_branches_that_draw(lanes):
    def f(cond, w, key, flag):
        return cond(flag, lambda x: x * jnp.sin(w) + jax.random.normal(key), lambda x: x * w, 1.5)

    flags, lane_keys = np.array([False, True, True]), keys("rbg")

    def total(cond):
        function = jax.vmap(lambda w, key, flag: f(cond, w, key, flag), in_axes=(None, 0, 0))
        values, pullback = jax.vjp(lambda w: function(w, lane_keys, flags), 0.7)
        return function(0.7, lane_keys, flags), values, pullback(np.arange(1.0, 4.0))

    def of_loopax(*args):
        return lx.cond(*args, lanes=LANES.get(lanes, lanes))

    got = jax.jit(lambda: total(of_loopax))()
    if lanes == "sequential":  # each lane draws alone
        alone = jnp.stack([f(lax.cond, 0.7, key, flag) for key, flag in zip(lane_keys, flags, strict=True)])
        np.testing.assert_allclose(got[0], alone)
        np.testing.assert_allclose(got[1], alone)
    else:
        jax.tree.map(np.testing.assert_allclose, got, jax.jit(lambda: total(lax.cond))())


@pytest.mark.parametrize("impl", IMPLS)
def test_free_lanes_draw_the_same_with_and_without_a_derivative(impl):
    def lane(w, key, n):
        def outer(i, x, key):
            return lx.fori_loop(0, n, lambda j, x: jnp.sin(w * x) + jax.random.normal(key), x, max_steps=3)

        return lx.fori_loop(0, 2, outer, 0.5, key=key, lanes="free")

    given = keys(impl), np.array([1, 3, 2], np.int32)
    batch = jax.jit(lambda w: jax.vmap(lambda *g: lane(w, *g))(*given))
    total = lambda w: batch(w).sum()
    np.testing.assert_allclose(jax.jvp(batch, (0.7,), (1.0,))[0], batch(0.7))
    value, slope = jax.value_and_grad(total)(0.7)
    np.testing.assert_allclose(value, total(0.7))
    np.testing.assert_allclose(slope, (total(0.7 + 1e-6) - total(0.7 - 1e-6)) / 2e-6, 1e-6)


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
    "reversed": lambda x: x[::-1],
    "rolled": lambda x: jnp.roll(x, 1, 0),
    "cumulative": lambda x: jnp.cumsum(x, 0),
    "product of lanes": lambda x: x @ x.T @ x,
    "reshaped": lambda x: x.reshape(2, -1).T.reshape(x.shape),
    "scan over lanes": lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(2), x)[1],
    "mean in a loop": lambda x: lax.fori_loop(0, 2, lambda _, x: x - x.mean(0, keepdims=True), x),
    "mean in a branch": lambda x: lax.cond(x.shape[1] > 1, lambda x: x - x.mean(0, keepdims=True), lambda x: x, x),
    "largest decides": lambda x: lax.cond(jnp.max(x) > 1, jnp.sin, jnp.cos, x),
}
KEEPING = {
    "sine": jnp.sin,
    "product": lambda x: jnp.tanh(x @ WEIGHT),
    "product from the left": lambda x: jnp.einsum("ij,nj->ni", WEIGHT, x),
    "sum of each": lambda x: x - x.sum(1, keepdims=True),
    "softmax of each": lambda x: jax.nn.softmax(x, -1),
    "transposed twice": lambda x: jnp.sin(x.T).T,
    "map over lanes": lambda x: lax.map(lambda row: row / row.sum(), x),
    "loop": lambda x: lax.fori_loop(0, 2, lambda _, x: jnp.sin(x) + 1.0, x),
    "branch": lambda x: lax.cond(x.shape[1] > 1, jnp.sin, jnp.cos, x),
    "parts": lambda x: jnp.concatenate([x[:, 1:], x[:, :1]], 1),
    "checkpoint": jax.checkpoint(jnp.sin),
}


def with_custom_vmap(function, **options):
    def lane(w, x, n):
        return lx.fori_loop(0, n, lambda i, x: jnp.cos(w * function(x)), x, max_steps=ROWS, **options)

    return lane


def as_masked_scan(function):
    def lane(w, x, n):
        step = lambda x, i: (jnp.where(i < n, jnp.cos(w * function(x)), x), None)
        return lax.scan(step, x, jnp.arange(ROWS, dtype=jnp.int32))[0]

    return lane


STARTS = np.array([[0.3, -0.5], [0.8, 0.1], [-0.4, 0.6]])


def value_and_slope(lane):
    batch = jax.jit(lambda w: jax.vmap(lambda *g: lane(w, *g))(STARTS, LENGTHS))
    return batch(0.7), jax.jvp(batch, (0.7,), (1.0,))


def leaves_its_batch(lane):
    batch = jax.make_jaxpr(lambda w: jax.vmap(lambda *g: lane(w, *g))(STARTS, LENGTHS))(0.7)
    return any(eqn.primitive.name == "compact_vmap" for eqn in batch.jaxpr.eqns)


@pytest.mark.parametrize("rule", MIXING)
def test_rules_that_mix_lanes_run_in_lockstep(rule):
    function = custom(MIXING[rule])
    lane = with_custom_vmap(function, lanes=LANES["compact"])
    assert not leaves_its_batch(lane)
    jax.tree.map(np.testing.assert_allclose, value_and_slope(lane), value_and_slope(as_masked_scan(function)))


@pytest.mark.parametrize("rule", KEEPING)
def test_rules_that_keep_lanes_apart_do_not(rule):
    function = custom(KEEPING[rule])
    lane = with_custom_vmap(function, lanes=LANES["compact"])
    assert leaves_its_batch(lane)
    jax.tree.map(np.testing.assert_allclose, value_and_slope(lane), value_and_slope(as_masked_scan(function)))


def test_a_rule_that_does_not_take_every_batch_may_mix_lanes():
    function = jax.custom_batching.custom_vmap(lambda x, y: x * y)

    @function.def_vmap
    def _(size, batched, x, y):
        if batched[1]:
            raise NotImplementedError
        return x * y, True

    lane = with_custom_vmap(lambda x: function(x, 2.0), lanes=LANES["compact"])
    assert not leaves_its_batch(lane)


@pytest.mark.parametrize("kind", ["auto", "residuals", "checkpointed"])
def test_a_batch_of_gradients_of_rules_is_refused_as_in_jax(kind):
    function = custom(MIXING["mean"])
    for gradient in (jax.grad, jax.hessian):
        with pytest.raises(ValueError, match="Linearization failed"):
            jax.vmap(gradient(lambda x: jnp.sum(function(x) * x)))(STARTS)
        loop = lambda x: lx.fori_loop(0, 3, lambda _, x: function(x) * x, x, kind=kind).sum()
        with pytest.raises(ValueError, match="reverse mode through a loop whose body calls an operation that has none"):
            jax.vmap(gradient(loop))(STARTS)


# ---- where batches change


@pytest.mark.parametrize("call", [lx.lanes_map, lambda f, xs: list(lx.lanes_stream(f, iter(xs), lanes=2))])
def test_items_whose_results_would_depend_on_others_are_refused(call):
    def draw(key):
        return lx.fori_loop(0, 3, lambda i, x, key: x + jax.random.normal(key), 0.0, key=key)

    with pytest.raises(NotImplementedError, match=r"lanes_(map|stream)\(f, \.\.\.\): f calls random_bits"):
        call(draw, keys("rbg"))


@pytest.mark.parametrize("lanes", ["compact", "auto"])
def test_explain_says_that_lanes_stay_together(lanes):
    lane = of_loopax(by_carry, lanes=LANES[lanes])
    given = keys("rbg"), jax.vmap(lambda k: jax.random.split(k, ROWS))(keys("rbg")), LENGTHS
    (loop,) = lx.explain(lambda w: jax.vmap(lambda *g: lane(w, *g))(*given).sum(), 0.7).loops
    assert (loop.mixed_by, loop.waiting) == ("random_bits", 3)
    (loop,) = lx.explain(lambda w: lane(w, *jax.tree.map(lambda x: x[0], given)), 0.7).loops
    assert loop.mixed_by == ""


def drawn_again(carry):
    """A step whose derivative needs what it has drawn."""
    key, v = carry
    key, use = jax.random.split(key)
    v = 0.8 * v + 0.3 * jax.random.normal(use, (2,))
    return key, jnp.sin(v * v)


def drawn_at(key, i, v):
    v = 0.8 * v + 0.3 * jax.random.normal(jax.random.fold_in(key, i), (2,))
    return jnp.sin(v * v)


AGAIN = [lambda f: f, jax.checkpoint, lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)]


@pytest.mark.parametrize("wrap", AGAIN, ids=["as it is", "checkpoint", "policy"])
@pytest.mark.parametrize(
    "kind", ["auto", "bounded", "residuals", "checkpointed", lx.Checkpointed(2), lx.Truncated(last=4)]
)
def test_a_batch_of_gradients_evaluates_steps_with_the_numbers_that_they_drew(kind, wrap):
    """A step is evaluated again for all lanes together, also where the first of them has finished."""
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 3)
    starts, counts = jnp.arange(6.0).reshape(3, 2) / 9, jnp.array([1, 3, 4])

    def masked(v):
        data, w = jax.random.key_data(keys), v
        for i in range(4):
            key, new = jax.vmap(drawn_again)((jax.random.wrap_key_data(data, impl="rbg"), v))
            takes = (i < counts)[:, None]
            data, v = jnp.where(takes, jax.random.key_data(key), data), jnp.where(takes, new, v)
            w = jnp.where(takes, jax.vmap(drawn_at, (0, None, 0))(keys, i, w), w)
        return v.sum() + w.sum()

    def lane(v, n, key):
        """The key in the carry, and the key of all steps."""
        carried = lx.fori_loop(0, n, lambda _, c: wrap(drawn_again)(c), (key, v), max_steps=4, kind=kind)[1]
        at = wrap(drawn_at)
        return carried.sum() + lx.fori_loop(0, n, lambda i, v: at(key, i, v), v, max_steps=4, kind=kind).sum()

    expected = jax.jit(jax.grad(masked))(starts)
    got = jax.jit(jax.vmap(jax.grad(lane)))(starts, counts, keys)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    got = jax.jit(jax.grad(lambda v: jax.vmap(lane)(v, counts, keys).sum()))(starts)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("last", "options"),
    [
        (1, {"max_steps": ROWS}),
        (2, {"max_steps": ROWS}),
        (2, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (1, {}),
                (3, {"max_steps": ROWS}),
                (3, {"max_steps": ROWS, "lanes": LANES["compact"]}),
                (4, {}),
            ]
        ),
    ],
)
def test_the_last_steps_of_lanes_that_end_at_different_times(last, options):
    """A lane's last steps take from other lanes what these had at the same steps, with the derivative of their last."""
    kind = lx.Truncated(last=last, kind=lx.Residuals() if "max_steps" in options else lx.Checkpointed(2))
    less_mean = custom(MIXING["mean"])

    def step(w, x, i, key):
        return jnp.cos(w * less_mean(x)) + jax.random.normal(jax.random.fold_in(key, i), (2,))

    def of_loopax(w, x, n, key):
        return lx.fori_loop(0, n, lambda i, x: step(w, x, i, key), x, kind=kind, **options)

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

    got, expected = jax.jit(lambda: all_of(of_loopax))(), jax.jit(lambda: all_of(masked))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-12), got, expected)


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

    got, expected = jax.jit(lambda: all_of(lane))(), jax.jit(lambda: all_of(masked))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-12), got, expected)


def test_lanes_that_have_finished_keep_the_length_of_an_inner_pullback():
    """The inner loop has run before, and is walked back in each step."""

    def lane(run, w, x, n, m, key):
        pull = jax.vjp(lambda x: run(m, 3, lambda c: drawn(w, *c), (x, jax.random.key_data(key)))[0], x)[1]
        return lx.fori_loop(0, n, lambda i, ct: 1.0 + pull(ct)[0], jnp.ones(2), max_steps=ROWS)

    def run(m, most, step, c):
        return lx.fori_loop(0, m, lambda j, c: step(c), c, kind=lx.Checkpointed(1))

    got, expected = (jax.jit(partial(of_all_lanes, partial(lane, each)))(0.7) for each in (run, masked_steps))
    np.testing.assert_allclose(got, expected, 1e-9)


@pytest.mark.parametrize("inner", ["residuals", "reversible"])
def test_rows_of_the_last_steps_of_lanes_that_draw(inner):
    def draw(w, i, key):
        return w * jax.random.normal(jax.random.fold_in(key, i))

    def lane(w, n, key):
        inverse = lambda c, i: c - draw(w, i, key)
        kind = lx.Truncated(last=2, kind=lx.Reversible(inverse) if inner == "reversible" else inner)
        step = lambda x, i: (x + draw(w, i, key), w * x)
        return lx.scan(step, 0.5, jnp.arange(ROWS, dtype=jnp.int32), length=n, kind=kind)

    def masked(w, n, key):
        def step(x, i):
            cut = lambda leaf: jnp.where(i < n - 2, lax.stop_gradient(leaf), leaf)
            return cut(jnp.where(i < n, x + draw(w, i, key), x)), cut(jnp.where(i < n, w * x, 0.0))

        return lax.scan(step, 0.5, jnp.arange(ROWS, dtype=jnp.int32))

    def slopes(lane):
        batch = lambda w: jax.vmap(lane, (None, 0, 0))(w, LENGTHS, keys("rbg"))
        return jax.jacfwd(batch)(0.7), jax.jacrev(batch)(0.7)

    got, expected = jax.jit(lambda: slopes(lane))(), jax.jit(lambda: slopes(masked))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-12), got, expected)


def test_explain_says_what_steps_that_draw_again_store():
    key = jax.random.key(3, impl="rbg")

    def loop(kind, wrap):
        step = wrap(lambda v: drawn_again((key, v))[1])
        run = lambda v: lx.fori_loop(0, 4, lambda _, v: step(v), v, kind=kind).sum()
        (found,) = lx.explain(run, jnp.ones(2)).loops
        assert found.stored is not None
        return found.stored.what, found.stored.size > 0, found.stored.evaluations

    assert loop("bounded", jax.checkpoint) == loop("bounded", lambda f: f) == ("carries", True, 8)
    assert loop("residuals", lambda f: f) == ("residuals", True, 4)
    # Of each step its start, from which it draws again.
    assert loop("residuals", jax.checkpoint) == ("carries", True, 8)
