"""What goes through a loop: any pytree, any dtype; what is not an array, or does not change, stays as it is."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import loopax as lx
from tests.support.blocks import fori_loop, scan, while_loop

KINDS = ["auto", "lax", "checkpointed", "bounded", "residuals"]


class Cell(eqx.Module):
    """Three arrays, and leaves that are none."""

    weight: Any
    layers: list[Any]
    activation: Callable[[Any], Any]
    train: bool
    name: str
    nothing: None = None
    width: int = eqx.field(static=True, default=2)

    def __call__(self, x: Any) -> Any:
        assert type(self.train) is bool
        scale = {"double": 2.0, "half": 0.5}[self.name]
        return self.activation(scale * (x @ self.weight)) if self.train else x


class Equal:
    """Neither an array nor hashable."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)


W = jnp.array([[0.0, 1.0], [1.0, 0.0]])
X = jnp.array([1.0, 2.0])
NAMES = ["double", "half"]
CELL = Cell(W, [jnp.arange(3), jax.random.key(0)], jnp.abs, True, "double")


def lax_loop(step: Any, init: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, init))[1]


EACH_LOOP = pytest.mark.parametrize("loop", [while_loop, fori_loop, scan])
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def same(actual: Any, expected: Any) -> None:
    """Equal pytrees, to the type of every leaf; those that are not arrays are identical."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array) == isinstance(e, jax.Array)
        if not isinstance(e, jax.Array):
            assert a is e
            continue
        assert jax.typeof(a) == jax.typeof(e)  # weak types included
        a, e = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, e))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def eagerly(f: Any) -> Any:
    return f


def apply(state: tuple[Any, Any]) -> tuple[Any, Any]:
    model, x = state
    return model, model(x)


# ---- models and leaves that are not arrays


@EACH_LOOP
@pytest.mark.parametrize("jit", [eqx.filter_jit, eagerly])
def test_module_in_the_carry_comes_out_unchanged(loop: Any, jit: Any) -> None:
    model, x = jit(partial(loop, apply))((CELL, X))
    same(model, CELL)
    assert x.tolist() == [16.0, 8.0]


@EACH_LOOP
def test_module_in_the_carry_under_vmap(loop: Any) -> None:
    models = eqx.tree_at(lambda m: m.weight, CELL, jnp.stack([W, 2 * W]))
    axes = eqx.tree_at(lambda m: m.weight, jax.tree.map(lambda _: None, CELL), 0, is_leaf=lambda x: x is None)
    out, x = eqx.filter_vmap(partial(loop, apply), in_axes=((axes, None),), out_axes=((axes, 0)))((models, X))
    same(out, models)
    assert x.tolist() == [[16.0, 8.0], [128.0, 64.0]]


@EACH_KIND
@EACH_LOOP
def test_gradient_of_a_module_in_the_carry(loop: Any, kind: Any) -> None:
    if kind == "lax" and loop is while_loop:
        kind = "auto"

    def loss(model: Any) -> Any:
        out, x = loop(apply, (model, X), kind=kind)
        return x.sum() + 0.0 * out.weight.sum()

    gradient = eqx.filter_jit(eqx.filter_grad(loss))(CELL)
    expected = jax.grad(lambda w: (8 * X @ w @ w @ w).sum())(W)
    assert jax.tree.leaves(gradient) == [gradient.weight]
    assert gradient.weight.tolist() == expected.tolist()


@EACH_LOOP
def test_module_closed_over(loop: Any) -> None:
    loss = lambda model, x: loop(model, x).sum()
    assert eqx.filter_jit(loss)(CELL, X) == 24.0
    gradient = eqx.filter_jit(eqx.filter_grad(loss))(CELL, X)
    assert gradient.weight.tolist() == jax.grad(lambda w: (8 * X @ w @ w @ w).sum())(W).tolist()


def test_cond_fun_and_stop_see_what_is_not_an_array() -> None:
    def goes_on(state: Any) -> Any:
        model, x = state
        return (x[0] < 10.0) & (model.train is True)

    assert lx.while_loop(goes_on, apply, (CELL, X))[1].tolist() == [16.0, 8.0]
    step = lambda state, _: (apply(state), state[0].name)
    (model, x), name = lx.scan(step, (CELL, X), length=5, stop=lambda s, y: (s[1][0] > 10.0) & (y == "double"))
    same((model, name), (CELL, "double"))
    assert x.tolist() == [16.0, 8.0]


NOT_ARRAYS = [True, False, "name", np.str_("name"), None, jnp.tanh, abs, object(), Equal(), int, ...]


@pytest.mark.parametrize("leaf", NOT_ARRAYS, ids=lambda x: getattr(x, "__name__", type(x).__name__))
@EACH_LOOP
def test_leaf_that_is_no_array(loop: Any, leaf: Any) -> None:
    def step(state: Any) -> Any:
        assert state["leaf"] is leaf
        return {**state, "x": state["x"] + 1.0}

    same(loop(step, {"leaf": leaf, "x": jnp.float32(0)}), {"leaf": leaf, "x": jnp.float32(3)})


@EACH_LOOP
def test_leaves_that_differ_between_calls_of_one_body(loop: Any) -> None:
    run = lambda name, train: loop(apply, (Cell(W, [], jnp.abs, train, name), X))[1].tolist()
    assert [run("double", True), run("half", True), run("half", False)] == [[16.0, 8.0], [0.25, 0.125], [1.0, 2.0]]


@EACH_LOOP
@pytest.mark.parametrize("make", [lambda: "".join(["a", "b"]), lambda: NAMES.count, Equal])
def test_leaf_that_is_equal_but_not_identical_is_unchanged(loop: Any, make: Any) -> None:
    start = make()
    assert loop(lambda c: (make(), c[1] + 1), (start, 0)) == (start, 3)


def test_leaves_of_xs_that_are_no_arrays_go_to_each_step() -> None:
    def f(c: Any, x: Any) -> Any:
        assert (x["name"], x["flag"], x["nothing"]) == ("row", True, None)
        return x["f"](c + x["row"]), None

    xs = {"row": jnp.arange(3.0), "name": "row", "flag": True, "nothing": None, "f": jnp.negative}
    assert lx.scan(f, 0.0, xs)[0] == -1.0


def test_model_of_each_row_in_xs() -> None:
    models = eqx.tree_at(lambda m: (m.weight, m.layers), CELL, (jnp.stack([W, 2 * W, W]), []))
    run = eqx.filter_jit(lambda models: lx.scan(lambda x, model: (model(x), model), X, models))
    x, out = run(models)
    assert x.tolist() == [32.0, 16.0]
    same(eqx.tree_at(lambda m: m.train, out, True), models)
    gradient = eqx.filter_grad(lambda models: run(models)[0].sum())(models)
    assert gradient.weight.shape == (3, 2, 2)


def test_leaves_of_ys_that_are_no_arrays() -> None:
    _, ys = lx.scan(lambda c, _: (c, {"c": c, "name": "row", "nothing": None, "f": jnp.tanh}), 1.0, length=2)
    assert (ys["name"], ys["nothing"], ys["f"], ys["c"].tolist()) == ("row", None, jnp.tanh, [1.0, 1.0])


# ---- Python bools that become arrays


@EACH_LOOP
def test_python_bool_that_the_body_turns_into_an_array_is_promoted(loop: Any) -> None:
    step = lambda c: {"go": c["go"] & (c["x"] < 1), "flag": c["flag"], "x": c["x"] + 1}
    out = jax.jit(lambda: {**loop(step, {"go": True, "flag": True, "x": 0}), "flag": 0})()
    same(out, jax.jit(lambda: {**lax_loop(step, {"go": True, "flag": True, "x": 0}), "flag": 0})())
    assert out["go"].tolist() is False
    assert loop(step, {"go": True, "flag": True, "x": 0})["flag"] is True


@EACH_LOOP
def test_python_bool_that_is_promoted_differs_between_lanes(loop: Any) -> None:
    run = lambda limit: loop(lambda c: (c[0] & (c[1] < limit), c[1] + 1), (True, 0))[0]
    assert jax.vmap(run)(jnp.array([0, 1, 5])).tolist() == [False, False, True]


@EACH_LOOP
def test_promotion_of_one_leaf_may_promote_the_next(loop: Any) -> None:
    step = lambda c: (c[1], c[2], c[3] > 1.0, c[3] + 1.0)
    same(loop(step, (True, True, True, 0.0)), lax_loop(step, (True, True, True, 0.0)))


# ---- leaves that do not change


class Shift(NamedTuple):
    weight: Any
    scale: Any


WEIGHT = jnp.ones((5, 7))  # no other array has its number of elements


def step_shift(state: Any) -> Any:
    shift, x = state
    return shift, jnp.sin(x * shift.scale) + shift.weight.sum()


def nested_shift(state: Any) -> Any:
    return lx.fori_loop(0, 2, lambda _, state: step_shift(state), state)


def rebuilt_shift(state: Any) -> Any:
    (weight, scale), x = state
    return step_shift((Shift(jax.tree.leaves({"w": weight})[0], scale), x))


HOISTED = {
    "plain": step_shift,
    "rebuilt": rebuilt_shift,
    "jit": jax.jit(step_shift),
    "filter_jit": eqx.filter_jit(step_shift),
    "jit in jit": jax.jit(lambda state: jax.jit(step_shift)((state[0], state[1]))),
    "checkpoint": jax.checkpoint(step_shift),
    "nested loop": nested_shift,
}


def loops(jaxpr: Any) -> list[Any]:
    """All equations of the program that are loops or parts of them, also inner ones."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive.name in ("loop", "linear_loop", "replay") else []
        found += [e for p in eqn.params.values() if hasattr(p, "jaxpr") for e in loops(p.jaxpr)]
    return found


def size_35(variables: Any) -> list[Any]:
    return [v.aval.shape for v in variables if v.aval.shape[-2:] == (5, 7)]


@EACH_LOOP
@pytest.mark.parametrize("how", HOISTED)
def test_leaf_that_does_not_change_is_a_constant_of_the_loop(loop: Any, how: str) -> None:
    program = jax.make_jaxpr(lambda w, x: loop(HOISTED[how], (Shift(w, 2.0), x)))(WEIGHT, 1.0)
    assert loops(program.jaxpr)
    for eqn in loops(program.jaxpr):
        assert size_35(eqn.invars[2 : 2 + eqn.params["num_consts"]]) == [(5, 7)]
        assert size_35(eqn.outvars) == []


@EACH_LOOP
@pytest.mark.parametrize("how", HOISTED)
def test_leaf_that_does_not_change_has_its_value(loop: Any, how: str) -> None:
    start = (Shift(WEIGHT, 2.0), 1.0)
    shift, x = jax.jit(lambda state: loop(HOISTED[how], state))(start)
    assert shift.weight.tolist() == WEIGHT.tolist()
    np.testing.assert_allclose(x, lax_loop(HOISTED[how], start)[1], rtol=1e-14)


@EACH_KIND
@pytest.mark.parametrize("how", ["plain", "jit", "nested loop"])
def test_leaf_that_does_not_change_is_not_saved(how: str, kind: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        shift, x = fori_loop(HOISTED[how], (Shift(w, 2.0), x), kind=kind)
        return x + shift.weight.sum()

    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(WEIGHT, 1.0)
    saved = [shape for eqn in loops(program.jaxpr) for shape in size_35([*eqn.invars, *eqn.outvars])]
    assert set(saved) == {(5, 7)}


@EACH_LOOP
def test_leaf_that_does_not_change_is_not_batched(loop: Any) -> None:
    run = lambda x: loop(step_shift, (Shift(WEIGHT, 2.0), x))
    program = jax.make_jaxpr(jax.vmap(run, out_axes=(None, 0)))(jnp.arange(4.0))
    (eqn,) = loops(program.jaxpr)
    assert size_35(eqn.invars) == [(5, 7)]


LANES: dict[str, Any] = {
    "while_loop": lambda n, init: lx.while_loop(lambda c: c[1] < n.astype(float), step_shift, init),
    "fori_loop": lambda n, init: lx.fori_loop(0, n, lambda _, c: step_shift(c), init),
    "scan": lambda n, init: lx.scan(lambda c, x: (step_shift(c), x), init, jnp.arange(4), n)[0],
}


@pytest.mark.parametrize("loop", LANES)
def test_leaf_that_does_not_change_is_not_batched_where_lanes_differ(loop: str) -> None:
    run = jax.vmap(lambda n: LANES[loop](n, (Shift(WEIGHT, 2.0), 1.0)), out_axes=(None, 0))
    (eqn,) = loops(jax.make_jaxpr(run)(jnp.arange(4)).jaxpr)
    assert size_35(eqn.invars) == [(5, 7)]


@EACH_LOOP
def test_leaf_that_does_not_change_is_not_differentiated(loop: Any) -> None:
    run = lambda x: loop(step_shift, (Shift(WEIGHT, 2.0), x))
    program = jax.make_jaxpr(lambda x: jax.jvp(run, (x,), (x,)))(1.0)
    (eqn,) = loops(program.jaxpr)
    assert size_35(eqn.invars) == [(5, 7)]


@EACH_LOOP
def test_leaves_that_change_places_are_not_constants(loop: Any) -> None:
    assert loop(lambda c: (c[1], c[0]), (1.0, 2.0)) == (2.0, 1.0)


@EACH_LOOP
def test_leaf_that_is_replaced_by_another_constant_leaf(loop: Any) -> None:
    assert loop(lambda c: (c[0], c[0], c[1]), (1.0, 2.0, 3.0)) == (1.0, 1.0, 1.0)


# ---- dtypes

NUMBERS = [
    *("bool", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
]


def bump(tree: Any) -> Any:
    return jax.tree.map(lambda x: ~x if x.dtype == bool else x + jnp.ones((), x.dtype), tree)


@EACH_LOOP
@pytest.mark.parametrize("dtype", NUMBERS)
def test_dtype(loop: Any, dtype: str) -> None:
    carry = [jnp.ones(shape, dtype) for shape in [(), (2,), (0, 3)]]
    same(loop(bump, carry), bump(bump(bump(carry))))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_dtype_of_rows(dtype: str) -> None:
    xs = jnp.arange(3).astype(dtype)
    same(lx.scan(lambda c, x: (bump(c), (x, c)), xs[0], xs), lax.scan(lambda c, x: (bump(c), (x, c)), xs[0], xs))


def squares(run: Any) -> Any:
    return lambda x: run(0, 2, lambda _, c: (c[0] * c[0], c[1] + 1), (x, jnp.int8(0)))[0]


@EACH_KIND
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_gradient_in_its_dtype(dtype: str, kind: Any) -> None:
    x = jnp.full((), 1.5, dtype)
    gradient = jax.jit(jax.grad(squares(partial(lx.fori_loop, kind=kind)), holomorphic=dtype == "complex64"))
    same(gradient(x), 4 * x**3)


@EACH_LOOP
def test_gradient_of_a_zero_size_array(loop: Any) -> None:
    assert jax.grad(lambda x: loop(lambda c: c * c, x).sum())(jnp.zeros((0, 3))).shape == (0, 3)


# ---- PRNG keys

SPLIT: Any = lambda key: jax.random.split(key)[0]


@EACH_LOOP
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_prng_key_in_the_carry(loop: Any, make: Any, impl: str) -> None:
    of_default_impl = make is jax.random.key or impl == "threefry2x32"
    step = SPLIT if of_default_impl else lambda key: key + jnp.uint32(1)
    key = make(0, impl=impl)
    same(jax.jit(partial(loop, step))(key), lax_loop(step, key))


@EACH_LOOP
def test_prng_keys_of_lanes(loop: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    same(jax.vmap(partial(loop, SPLIT))(keys), jax.vmap(partial(lax_loop, SPLIT))(keys))


def test_prng_keys_in_rows() -> None:
    keys = jax.random.split(jax.random.key(0), (3, 2))
    f = lambda c, k: ((SPLIT(c[0]), c[1] + jax.random.normal(k[0])), (c[0], k))
    init = (jax.random.key(1), jnp.float64(0))
    same(lx.scan(f, init, keys), lax.scan(f, init, keys))


@EACH_KIND
def test_gradient_with_a_prng_key_in_the_carry(kind: Any) -> None:
    run = partial(lx.fori_loop, kind=kind)

    def loss(x: Any, loop: Any) -> Any:
        step = lambda _, c: (jax.random.fold_in(c[0], 1), c[1] * jax.random.bits(c[0]).astype(float))
        return loop(0, 3, step, (jax.random.key(0), x))[1]

    gradients = [jax.jit(partial(jax.grad(loss), loop=loop))(1.0) for loop in (run, lax.fori_loop)]
    same(*gradients)


# ---- weak types and Python numbers

i32, i64, f16, f32, f64 = jnp.int32(1), jnp.int64(1), jnp.float16(1), jnp.float32(1), jnp.float64(1)
bf16, c64 = jnp.bfloat16(1), jnp.complex64(1)
CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int": (0, lambda x: x + 1),
    "int + float": (0, lambda x: x + 1.5),
    "int + int8": (0, lambda x: x + jnp.int8(1)),
    "int + uint8": (0, lambda x: x + jnp.uint8(1)),
    "int + int32": (0, lambda x: x + i32),
    "int + int64": (0, lambda x: x + i64),
    "int + bfloat16": (0, lambda x: x + bf16),
    "int + complex": (0, lambda x: x + 1j),
    "int to int64": (0, lambda x: i64),
    "int to bool": (0, lambda x: x + jnp.asarray(True)),
    "float": (1.0, lambda x: x * 2.0),
    "float + int": (1.0, lambda x: x + 1),
    "float + int32": (1.0, lambda x: x + i32),
    "float + float16": (1.0, lambda x: x + f16),
    "float + bfloat16": (1.0, lambda x: x + bf16),
    "float + float32": (1.0, lambda x: x + f32),
    "float + float64": (1.0, lambda x: x + f64),
    "float + complex64": (1.0, lambda x: x + c64),
    "float + complex": (1.0, lambda x: x + 1j),
    "complex": (1j, lambda x: x * 2.0),
    "complex + complex64": (1j, lambda x: x + c64),
    "bool": (True, lambda x: x & jnp.asarray(False)),
    "int32": (i32, lambda x: x + 1),
    "float32": (f32, lambda x: x * 2.0),
    "float32 to itself": (f32, lambda x: x),
    "float to itself": (1.0, lambda x: x),
    "weak array": (jnp.asarray(1.0), lambda x: x + f16),
    "weak array to float": (jnp.asarray(1), lambda x: 2.5),
    "float64 to a Python number": (f64, lambda x: 2.0),
    "int64 to a Python number": (i64, lambda x: 2),
    "float to a Python number": (1.0, lambda x: 2.0),
    "swap of weak and strong": ((0, i64), lambda c: (c[1], c[0])),
    "swap of weak and strong floats": ((1.0, f64), lambda c: (c[1], c[0])),
    "numpy scalar": (np.float32(1), lambda x: x + 1.0),
    "numpy int": (np.int8(1), lambda x: x + 1),
    "numpy array": (np.ones(2, np.float32), lambda x: x * 2.0),
    "numpy bool": (np.bool_(True), lambda x: ~x),
    "result in numpy": (f32, lambda x: np.float32(3)),
    "array of weak type": (jnp.ones(2) * 1.0, lambda x: x * 2.0),
    "broadcast weak": (lax.full_like(jnp.asarray(1.0), 1.0, shape=(2,)), lambda x: x * 2.0),
}


def of_while(module: Any, step: Any, init: Any) -> Any:
    return module.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, init))


def of_fori(module: Any, step: Any, init: Any) -> Any:
    return module.fori_loop(0, 3, lambda _, c: step(c), init)


def of_scan(module: Any, step: Any, init: Any) -> Any:
    return module.scan(lambda c, _: (step(c), (c, step(c))), init, length=3)


def of_scan_without_steps(module: Any, step: Any, init: Any) -> Any:
    return module.scan(lambda c, _: (step(c), (c, step(c))), init, length=0)


EACH_FORM = pytest.mark.parametrize("form", [of_while, of_fori, of_scan, of_scan_without_steps])


@EACH_FORM
@pytest.mark.parametrize("case", CASES)
def test_types_are_those_of_lax(form: Any, case: str) -> None:
    init, step = CASES[case]
    types = lambda module: jax.make_jaxpr(partial(form, module, step))(init).out_avals
    with jax.numpy_dtype_promotion("standard"):
        assert types(lx) == types(lax)


@pytest.mark.parametrize("jit", [jax.jit, eagerly])
@pytest.mark.parametrize("case", CASES)
def test_values_and_types_are_those_of_lax(case: str, jit: Any) -> None:
    init, step = CASES[case]
    with jax.numpy_dtype_promotion("standard"):
        same(*(jax.tree.map(jnp.asarray, jit(partial(of_scan, module, step))(init)) for module in (lx, lax)))


@pytest.mark.parametrize("case", ["int + float", "int + int64", "swap of weak and strong"])
def test_types_are_those_of_lax_where_no_step_is_taken_outside_of_jit(case: str) -> None:
    init, step = CASES[case]
    with jax.numpy_dtype_promotion("standard"):
        same(*(of_scan_without_steps(module, step, init) for module in (lx, lax)))


@EACH_FORM
def test_types_are_those_of_lax_under_vmap(form: Any) -> None:
    step = lambda c: (c[0] + 1.5, c[1] + f32, c[2])
    run = lambda module: jax.vmap(partial(form, module, step), in_axes=((0, None, None),))((jnp.arange(2.0), 0, 0))
    with jax.numpy_dtype_promotion("standard"):
        same(run(lx), run(lax))


@EACH_FORM
@pytest.mark.parametrize("jit", [jax.jit, eagerly])
def test_weak_types_are_promoted_as_often_as_it_takes(form: Any, jit: Any) -> None:
    step = lambda c: (c[1], c[2], c[3] * 2, c[3])
    with jax.numpy_dtype_promotion("standard"):
        out = jit(partial(form, lx, step))((0, 0, 0, bf16))
    leaves = jax.tree.leaves(out)[1 if form is of_while else 0 :]
    assert [(x.dtype.name, x.weak_type) for x in leaves] == [("bfloat16", False)] * len(leaves)


REFUSED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int32 + float": (i32, lambda x: x + 1.5),
    "float32 to float64": (f32, lambda x: f64),
    "float32 to a weak float64": (f32, lambda x: 2.0 * jnp.ones(())),
    "float16 to a Python number": (f16, lambda x: 2.0),
    "bool to int": (jnp.asarray(True), lambda x: 1),
    "int to bool": (0, lambda x: x > 1),
    "numpy int to float": (np.int32(1), lambda x: x * 0.5),
}


@pytest.mark.parametrize("loop", [of_while, of_fori, of_scan])
@pytest.mark.parametrize("case", REFUSED)
def test_changes_of_strong_types_are_refused_as_lax_does(loop: Any, case: str) -> None:
    init, step = REFUSED[case]
    with jax.numpy_dtype_promotion("standard"):
        with pytest.raises(TypeError):
            loop(lax, step, init)
        with pytest.raises(TypeError, match="same types"):
            loop(lx, step, init)


# ---- nothing to carry, nothing to read


EMPTY = pytest.mark.parametrize("empty", [(), None, {}, [], ((), None)], ids=str)


@EMPTY
def test_empty_carry(empty: Any) -> None:
    assert lx.fori_loop(0, 3, lambda _, c: c, empty) == empty
    carry, ys = lx.scan(lambda c, x: (c, 2 * x), empty, jnp.arange(3))
    assert (carry, ys.tolist()) == (empty, [0, 2, 4])


@EMPTY
def test_empty_carry_of_while_loop(empty: Any) -> None:
    assert lx.while_loop(lambda _: False, lambda c: c, empty) == empty
    out, info = lx.while_loop(lambda _: True, lambda c: c, empty, max_steps=3, throw=False, info=True)
    assert (out, info.num_steps, info.limit_reached) == (empty, 3, True)


@pytest.mark.parametrize("xs", [None, (), {}, [(), None], {"name": "only"}])
def test_xs_without_arrays(xs: Any) -> None:
    carry, seen = lx.scan(lambda c, x: (c + 1, (c, x)), 0, xs, length=3)
    assert (carry, seen[0].tolist(), seen[1]) == (3, [0, 1, 2], xs)


@pytest.mark.parametrize("empty", [None, (), {}])
def test_scan_with_neither_carry_nor_outputs(empty: Any) -> None:
    assert lx.scan(lambda c, _: (c, empty), empty, jnp.arange(3)) == (empty, empty)


@pytest.mark.parametrize("reverse", [False, True])
def test_xs_with_no_rows(reverse: bool) -> None:
    f = lambda c, x: (c + x.sum(), {"y": x, "z": 2 * c})
    args: Any = (f, 0.0, jnp.zeros((0, 3)), None, reverse)
    same(lx.scan(*args), lax.scan(*args))


def test_rows_with_no_elements() -> None:
    f = lambda c, x: (c + x.sum(), x)
    same(lx.scan(f, 0.0, jnp.zeros((3, 0))), lax.scan(f, 0.0, jnp.zeros((3, 0))))


@EACH_KIND
def test_gradient_with_an_empty_carry(kind: Any) -> None:
    loss = lambda xs: (lx.scan(lambda c, x: (c, x * x), (), xs, kind=kind)[1]).sum()
    assert jax.grad(loss)(jnp.arange(3.0)).tolist() == [0.0, 2.0, 4.0]


@EACH_LOOP
def test_named_tuples_and_dataclasses_keep_their_type(loop: Any) -> None:
    out = loop(lambda c: Shift(c.weight + 1, c.scale), Shift(0, [1.0]))
    assert type(out) is Shift
    assert out == Shift(3, [1.0])
