"""What computes for a lane from other lanes: draws with keys of rbg, and rules of `custom_vmap`.

The reference is a `lax.scan` of all rows that keeps the carry of a finished lane: JAX's own batch of such a loop.
"""

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
