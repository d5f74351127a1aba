"""`rewrite_loops`: the loops and branches of other people's functions run on loopax, wherever they stand."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import loopax as lx
from loopax._src.jax_internals import inner_jaxprs
from loopax.insight import LoopExplanation
from tests.support.reference import assert_close


def halve(x):
    """Halve until below 1; differentiable by hand: x / 2**n."""
    return lax.while_loop(lambda c: c > 1.0, lambda c: 0.5 * jnp.sin(c) + 0.25 * c, x)


def plain(x):
    """The same as Python, for one number."""
    while x > 1.0:
        x = 0.5 * np.sin(x) + 0.25 * x
    return x


def derivatives(x):
    """The first and the second, by the chain rule."""
    first, second = 1.0, 0.0
    while x > 1.0:
        slope, curvature = 0.5 * np.cos(x) + 0.25, -0.5 * np.sin(x)
        first, second = slope * first, curvature * first**2 + slope * second
        x = 0.5 * np.sin(x) + 0.25 * x
    return first, second


X = np.array([0.5, 1.5, 3.0, 40.0])
VALUES = np.array([plain(x) for x in X])
SLOPES, CURVATURES = np.array([derivatives(x) for x in X]).T


# The loop somewhere inside a function of one number.
INSIDE = {
    "donated": jax.jit(lambda x: jax.jit(lambda x, y: halve(x) + 0.0 * y, donate_argnums=1)(x, x + 1.0)),
    "cond": lambda x: lax.cond(x > 0.0, halve, lambda x: x, x),
    "switch": lambda x: lax.switch(1, [lambda x: x, halve, jnp.sin], x),
    "scan": lambda x: lax.scan(lambda c, _: (halve(c), c), x, None, 1)[0],
    "checkpoint": jax.checkpoint(halve, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False),
    "while": lambda x: lax.while_loop(lambda c: c[1] < 1, lambda c: (halve(c[0]), c[1] + 1), (x, 0))[0],
    "loopax": lambda x: lx.fori_loop(0, 1, lambda _, x: halve(x), x),
    "kwargs": lambda x: eqx.filter_jit(lambda *, y: halve(y))(y=x),
}


@pytest.mark.parametrize("wrapper", INSIDE)
def test_loops_are_found_wherever_they_stand(wrapper):
    f = INSIDE[wrapper]
    rewritten = lx.rewrite_loops(f)
    run = jax.jit(lambda x: (rewritten(x), f(x), jax.jvp(rewritten, (x,), (1.0,))))
    new, old, _ = run(X[2])
    np.testing.assert_array_equal(new, old)
    assert_close(run(X[3])[2], (VALUES[3], SLOPES[3]))
    assert_close(jax.jit(jax.vmap(jax.value_and_grad(rewritten)))(X), (VALUES, SLOPES))
    assert loops_left(jax.make_jaxpr(rewritten)(X[0])) == []


def loops_left(closed):
    """The `lax` loops in a program, also inside of others."""
    found = [eqn for eqn in closed.eqns if eqn.primitive.name == "while"]
    return found + [loop for eqn in closed.eqns for inner in inner_jaxprs(eqn) for loop in loops_left(inner)]


@pytest.mark.parametrize(
    ("kind", "lanes"),
    [("auto", "lockstep"), ("checkpointed", "compact"), (lx.Checkpointed(3), lx.Compact(shrink=2, min_lanes=1))],
)
def test_kinds_and_lanes(kind, lanes):
    rewritten = lx.rewrite_loops(jax.jit(halve), kind=kind, lanes=lanes)
    assert_close(jax.jit(jax.vmap(jax.value_and_grad(rewritten)))(X), (VALUES, SLOPES))
    assert_close(jax.jit(jax.grad(lambda x: jax.vmap(rewritten)(x).sum()))(X), SLOPES)


@pytest.mark.parametrize("kind", ["bounded", "residuals"])
def test_kinds_that_need_a_bound(kind):
    bounded = lx.rewrite_loops(halve, kind=kind, max_steps=9)
    both = jax.jit(jax.vmap(lambda x: (jax.grad(bounded)(x), jax.hessian(bounded)(x))))
    assert_close(both(X), (SLOPES, CURVATURES))
    with pytest.raises(ValueError, match="max_steps"):
        lx.rewrite_loops(halve, kind=kind)(X[0])


def test_a_finished_lane_stays_in_its_domain():
    def leaves(x):
        return lax.while_loop(lambda c: c[1] > 0, lambda c: (c[0] * jnp.sqrt(c[1] * 1.0), c[1] - 1), (1.0, x))[0]

    gradient = jax.jit(jax.grad(lx.rewrite_loops(leaves)))
    xs = np.array([1.0, 3.0, 7.0])
    in_lanes = jax.jit(jax.vmap(gradient))(xs)
    assert np.isfinite(in_lanes).all()
    assert_close(in_lanes, np.stack([gradient(x) for x in xs]))


def test_rules_for_derivatives_are_kept():
    """With a slope that no loop could find."""
    with_jvp, with_vjp = jax.custom_jvp(halve), jax.custom_vjp(halve)
    with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 7.0 * tangents[0]))
    with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, ct: (7.0 * ct,))
    for f in (with_jvp, with_vjp):
        rewritten = lx.rewrite_loops(jax.jit(f))
        assert loops_left(jax.make_jaxpr(rewritten)(X[0])) == []
        assert_close(jax.jit(jax.vmap(jax.value_and_grad(rewritten)))(X), (VALUES, np.full(4, 7.0)))


def test_linear_solves_keep_their_rule():
    a = np.array([[3.0, 1.0], [1.0, 2.0]])

    def richardson(matvec, b):
        step = lambda c: (c[0] + 0.3 * (b - matvec(c[0])), c[1] + 1)
        return lax.while_loop(lambda c: c[1] < 80, step, (jnp.zeros_like(b), 0))[0]

    def solve(a, b):
        return lax.custom_linear_solve(lambda x: a @ x, b, richardson, symmetric=True)

    rewritten = lx.rewrite_loops(solve)
    b = np.array([1.0, -1.0])
    inverse = np.linalg.inv(a)
    wanted = (-np.einsum("ij,k->ijk", inverse, inverse @ b), inverse)
    both = jax.jit(lambda a, b: [mode(rewritten, (0, 1))(a, b) for mode in (jax.jacrev, jax.jacfwd)])
    assert_close(both(a, b), [wanted, wanted])


def test_lanes_over_devices():
    mesh = jax.make_mesh((1,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("device")
    sharded = jax.shard_map(jax.vmap(lambda x: x + halve(x)), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    rewritten = lx.rewrite_loops(sharded)
    assert loops_left(jax.make_jaxpr(rewritten)(X)) == []
    assert_close(jax.jit(rewritten)(X), X + VALUES)


def test_counted_loop_whose_lanes_have_limits_of_their_own():
    """Of a `jax.vmap` inside the function: no `fori_loop` has such limits."""

    def powers(x):
        return jax.vmap(lambda low, high: lax.fori_loop(low, high, lambda i, y: y * x + jnp.sin(i.astype(float)), 1.0))(
            np.array([0, 1, 2]), np.array([3, 2, 0])
        )

    def unrolled(x):
        return jnp.stack([(x * x + jnp.sin(1.0)) * x + jnp.sin(2.0), x + jnp.sin(1.0), 1.0 + 0.0 * x])

    rewritten = lx.rewrite_loops(powers)
    assert_close(jax.jit(rewritten)(1.3), unrolled(1.3))
    assert_close(jax.jit(jax.jacrev(rewritten))(1.3), jax.jacrev(unrolled)(1.3))


def test_counted_loops_know_their_length():
    def power(x, n):
        return lax.fori_loop(0, n, lambda i, y: y * x + i, 1.0)

    rewritten = lx.rewrite_loops(power, lanes=lx.Compact(min_lanes=1), max_steps=8)
    n = np.arange(4)
    jaxpr = jax.make_jaxpr(jax.vmap(rewritten))(X, n)
    (batch,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "compact_vmap"]
    assert not batch.params["static"].predicated
    wanted = np.array([python_power(x, m) for x, m in zip(X, n, strict=True)]).T
    assert_close(jax.jit(jax.vmap(jax.value_and_grad(rewritten)))(X, n), tuple(wanted))


def python_power(x, n):
    """The value and its derivative."""
    y, slope = 1.0, 0.0
    for i in range(n):
        y, slope = y * x + i, slope * x + y
    return y, slope


@pytest.mark.parametrize(("lower", "upper"), [(0, 5), (3, 3), (4, 1), (-2, 2)])
def test_the_index_ends_where_it_does_in_lax(lower, upper):
    def counted(lower, upper):
        return lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1], c[2] + c[0]), (lower, upper, 0))

    given = np.int32(lower), np.int32(upper)
    both = jax.jit(lambda *given: (counted(*given), lx.rewrite_loops(counted)(*given)))
    for old, new in zip(*both(*given), strict=True):
        assert jnp.result_type(old) == jnp.result_type(new)
        assert int(old) == int(new)


def test_loops_that_only_look_counted():
    """The limit moves, or the index skips."""
    moving = lambda n: lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 1, c[1] - 1), (0, n))
    skipping = lambda n: lax.while_loop(lambda c: c[0] < c[1], lambda c: (c[0] + 2, c[1]), (0, n))
    for f in (moving, skipping):
        assert jax.tree.map(int, lx.rewrite_loops(f)(9)) == jax.tree.map(int, f(9))


def test_scans_on_request():
    f = lambda x: lax.scan(lambda c, r: (jnp.sin(c) * r, c), x, np.arange(1.0, 4.0), reverse=True)
    names = lambda g: [eqn.primitive.name for eqn in jax.make_jaxpr(g)(X[0]).eqns]
    rewritten = lx.rewrite_loops(f, scans=True, kind="checkpointed")
    assert "scan" in names(lx.rewrite_loops(f))
    assert "scan" not in names(rewritten)
    assert "loop" in names(rewritten)
    new, old = jax.jit(lambda x: (jax.jacrev(rewritten)(x), jax.jacrev(f)(x)))(X[0])
    assert_close(new, old)


def test_a_function_without_loops_is_the_same_program():
    f = lambda x: jax.jit(jnp.sin)(x) + lax.scan(lambda c, _: (c * x, c), x, None, 3)[0]
    assert str(jax.make_jaxpr(lx.rewrite_loops(f))(X[0])) == str(jax.make_jaxpr(f)(X[0]))


def test_arguments_that_are_not_arrays():
    @lx.rewrite_loops
    def f(x, name, *, steps, activation):
        out = lax.while_loop(lambda c: c[1] < steps, lambda c: (activation(c[0]), c[1] + 1), (x["a"], 0))[0]
        return {name: out, "flag": steps > 2, "shape": (steps,)}

    out = f({"a": X}, "result", steps=3, activation=jnp.sin)
    assert out["flag"] is True
    assert out["shape"] == (3,)
    assert_close(out["result"], np.sin(np.sin(np.sin(X))))


def test_effects_happen_as_often(capfd):
    def body(c):
        jax.debug.print("at {}", c)
        return c - 1.0

    prints = lambda x: lax.while_loop(lambda c: c > 0.0, body, x)
    jax.block_until_ready(jax.grad(lx.rewrite_loops(prints))(2.0))
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["at 2.0", "at 1.0"]


def test_weak_types_and_keys_are_those_of_the_function():
    def draw(key):
        start = (key, jnp.zeros(()), 0)
        split = lambda c: (jax.random.split(c[0])[0], c[1] + jax.random.normal(c[0]), c[2] + 1)
        return lax.while_loop(lambda c: c[2] < 3, split, start)

    (key, *new), (old_key, *old) = lx.rewrite_loops(draw)(jax.random.key(1)), draw(jax.random.key(1))
    assert jax.random.key_data(key).tolist() == jax.random.key_data(old_key).tolist()
    assert list(map(jax.typeof, new)) == list(map(jax.typeof, old))
    assert_close(new, old)


# ---- a function that chooses the kind of each loop


def swing(i: Any, c: Any) -> Any:
    q, p = c
    p = p - 0.01 * jnp.sin(q)
    return q + 0.01 * p, p


def unswing(i: Any, c: Any) -> Any:
    q, p = c
    q = q - 0.01 * p
    return q, p + 0.01 * jnp.sin(q)


def of_others(a: Array) -> Array:
    """A scan that can be undone, and a loop that converges."""
    q, p = lax.scan(lambda c, _: (swing(0, c), None), (a, 0.1 * a), None, length=50)[0]
    goes_on = lambda c: jnp.abs(c[0] - c[1]) > 1e-13
    return lax.while_loop(goes_on, lambda c: (jnp.cos(a * c[0]) + 0.1 * p, c[0]), (q, q + 1))[0]


def test_each_loop_has_its_own() -> None:
    seen: list[LoopExplanation] = []

    def choose(loop: LoopExplanation) -> lx.Kind:
        seen.append(loop)
        if loop.function == "lax.scan":
            return lx.Reversible(lambda c, x: list(unswing(0, c)), rtol=1e-9)
        return lx.Checkpointed(7)

    found = jax.jit(jax.grad(lx.rewrite_loops(of_others, kind=choose, scans=True)))(0.7)
    assert_close(found, jax.grad(lx.rewrite_loops(of_others))(0.7))
    scan, loop = seen
    assert scan.most_steps == 50
    assert "test_rewrite.py" in scan.source
    assert loop.function == "lax.while_loop"
    assert [leaf.role for leaf in loop.leaves[:2]] == ["carried", "carried"]


def test_an_inverse_of_a_fori_loop_gets_the_carry_without_the_index() -> None:
    loss = lambda a, n: sum(lax.fori_loop(0, n, swing, (a, a)))
    kind = lambda loop: lx.Reversible(lambda i, c: list(unswing(i, c)), rtol=1e-9)
    found = jax.grad(lx.rewrite_loops(loss, kind=kind))(0.7, jnp.int32(9))
    assert_close(found, jax.grad(loss)(0.7, 9))


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="fn of rewrite_loops"):
        lx.rewrite_loops(3)  # pyright: ignore[reportArgumentType]
    pattern = r"rewrite_loops\(kind=\.\.\.\), which returned 'fast' for lax\.while_loop at \S*test_rewrite\.py"
    with pytest.raises(ValueError, match=pattern):
        lx.rewrite_loops(of_others, kind=lambda loop: "fast")(0.7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"kind=Implicit\(\) is a derivative"):
        lx.rewrite_loops(of_others, kind=lx.Implicit())  # pyright: ignore[reportArgumentType]
    kind: Any = lx.Bounded  # a class is no function that chooses
    with pytest.raises(ValueError, match=r"kind=Bounded is a class, and an object is expected: write kind=lx\.Bounded"):
        lx.rewrite_loops(of_others, kind=kind)


POINTS = np.array([-2.0, 0.0, 0.5, 3.0])


def root_or_zero(x):
    """With an infinite derivative in the branch that lanes up to zero do not take."""
    return lax.cond(x > 0, jnp.sqrt, lambda x: 0.0 * x, x)


def of_three(x):
    """A switch, whose index is clamped."""
    return lax.switch(jnp.floor(x).astype(int), [jnp.cos, lambda x: x * x, jnp.sqrt], x)


def in_a_loop(x):
    """A branch in a loop in a branch."""
    body = lambda _, y: lax.cond(y > 1, lambda y: 0.5 * y, lambda y: 1.5 * y * x, y)
    return lax.cond(x > 0, lambda x: lax.fori_loop(0, 3, body, x), jnp.sin, x)


def nested(x):
    """In a call and a `jax.checkpoint`."""
    return jax.checkpoint(jax.jit(root_or_zero))(x) + of_three(x)


LANES = ["lockstep", lx.Compact(shrink=2, min_lanes=1)]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("function", [root_or_zero, of_three, in_a_loop, nested])
def test_values_and_gradients_are_those_of_each_lane(function, lanes) -> None:
    rewritten = lx.rewrite_loops(function, conds=True, scans=True, lanes=lanes)
    both = jax.value_and_grad(rewritten)
    wanted = [jax.value_and_grad(function)(x) for x in POINTS]
    assert_close(jax.jit(jax.vmap(both))(POINTS), jax.tree.map(lambda *rows: jnp.stack(rows), *wanted))
    assert_close(both(POINTS[3]), wanted[3])
    names = str(jax.make_jaxpr(rewritten)(POINTS[0]))
    assert "cond[" not in names


def test_a_branch_that_no_lane_takes_is_not_run() -> None:
    """Where that is asked for: nothing is exchanged otherwise."""
    calls = []
    costly = lambda x: jax.pure_callback(lambda x: calls.append(1) or x, x, x, vmap_method="expand_dims")
    function = lambda x: lax.cond(x > 9, costly, lambda x: x + 1, x)
    assert_close(jax.vmap(lx.rewrite_loops(function, conds=True))(POINTS), POINTS + 1)
    assert calls == []
    jax.block_until_ready(jax.vmap(lx.rewrite_loops(function))(POINTS))
    assert calls


def test_a_choice_of_platform_stays() -> None:
    def function(x):
        return lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)

    rewritten = lx.rewrite_loops(function, conds=True)
    assert str(jax.make_jaxpr(rewritten)(POINTS[0])) == str(jax.make_jaxpr(function)(POINTS[0]))
    assert_close(rewritten(POINTS), np.sin(POINTS))


def test_mutable_arrays_and_prints(capfd) -> None:
    def function(x):
        ref = jax.new_ref(jnp.zeros(2))

        def first():
            ref[0] = x
            jax.debug.print("first {}", x)

        def second():
            ref[1] = x
            jax.debug.print("second {}", x)

        lax.cond(x > 0, first, second)
        return ref[...]

    assert_close(jax.jit(lx.rewrite_loops(function, conds=True))(3.0), jnp.array([3.0, 0.0]))
    jax.effects_barrier()
    assert capfd.readouterr().out == "first 3.0\n"


def in_lax(x: Any, n: Any) -> Any:
    """Loops of `jax.lax` in each other, in a branch and in a scan."""

    def halve_often(x: Any) -> Any:
        return lax.while_loop(lambda x: x.sum() > 0.1, lambda x: 0.5 * x, x)

    def step(x: Any, k: Any) -> tuple[Any, Any]:
        x = lax.fori_loop(0, (n + k) % 4, lambda _, x: jnp.sin(x) + 0.2, x)
        x = lax.cond(x.sum() > 1.0, halve_often, lambda x: 1.1 * x, x)
        x, _ = lax.scan(lambda x, _: (jnp.cos(x), None), x, None, 2)  # holds no loop
        return x, x.sum()

    again = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_saveable)
    return lax.while_loop(lambda c: c[1] < n, lambda c: (lax.scan(again, c[0], jnp.arange(3))[0], c[1] + 1), (x, 0))[0]


def test_free_lanes_of_a_loop_with_one_in_it_that_nobody_uses() -> None:
    def f(x: Any, n: Any) -> Any:
        def step(x: Any, k: Any) -> tuple[Any, Any]:
            lax.while_loop(lambda y: y < k, lambda y: y + 1.0, x)
            return jnp.sin(x), None

        return lax.scan(step, x, jnp.arange(3.0) * n)[0]

    starts, numbers = jnp.linspace(0.1, 0.9, 3), jnp.arange(3.0)
    assert_close(jax.vmap(lx.rewrite_loops(f, lanes="free"))(starts, numbers), jax.vmap(f)(starts, numbers))


def test_free_lanes_make_one_loop_of_those_of_lax() -> None:
    """The outer scan and the branch are exchanged, too, in a `jax.checkpoint`; the scan without a loop in it is not."""
    starts, lengths = jnp.linspace(0.1, 0.9, 12).reshape(4, 3), jnp.array([3, 0, 1, 5])
    free = jax.vmap(lx.rewrite_loops(in_lax, lanes="free"))
    closed = jax.make_jaxpr(free)(starts, lengths)
    assert sum(eqn.primitive.name == "loop" and eqn.params["bound"] != 1 for eqn in closed.eqns) == 1
    assert "while[" not in str(closed)
    assert str(closed).count("scan[") == 1
    assert_close(jax.jit(free)(starts, lengths), jax.vmap(in_lax)(starts, lengths))
    loss = lambda f: lambda x, n: f(x, n).sum()
    found = jax.jit(jax.vmap(jax.grad(loss(lx.rewrite_loops(in_lax, lanes="free")))))(starts, lengths)
    each = jax.grad(loss(lx.rewrite_loops(in_lax)))
    assert_close(found, jnp.stack([each(x, n) for x, n in zip(starts, lengths, strict=True)]))
