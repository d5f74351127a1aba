"""Flax NNX objects in loops: the meaning is the Python loop's, for what changes in place too."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.errors import TraceContextError

import loopax as lx

KINDS = ["auto", lx.Checkpointed(), lx.Checkpointed(2), "bounded", "residuals", "lax"]
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)
STEPS, SIZE = 4, 3
X = jnp.array([1.0, -0.5, 2.0])


class Cell(nnx.Module):
    """Weights that stay, and a counter, statistics and dropout that change."""

    def __init__(self, seed: Any = 0, rate: float = 0.5) -> None:
        rngs = nnx.Rngs(seed)
        self.linear = nnx.Linear(SIZE, SIZE, param_dtype=jnp.float64, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(0))
        self.mean = nnx.BatchStat(jnp.float64(0))
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean()
        return x + 0.1 * self.dropout(jnp.tanh(self.linear(x))) + self.mean[...]


class Counter(nnx.Module):
    """The smallest module."""

    def __init__(self, start: Any = 0) -> None:
        self.count = nnx.Variable(jnp.int32(start))


def apply(carry: tuple[Any, Any]) -> tuple[Any, Any]:
    model, x = carry
    return model, model(x)


def count(counter: Any) -> Any:
    counter.count[...] += 1
    return counter


def python(steps: int, model: Any, x: Any) -> tuple[Any, Any]:
    """The plain Python loop."""
    for _ in range(steps):
        x = model(x)
    return model, x


def while_loop(n: Any, step: Any, init: Any, **options: Any) -> Any:
    body = lambda c: (c[0] + 1, step(c[1]))
    return lx.while_loop(lambda c: c[0] < n, body, (jnp.int32(0), init), max_steps=STEPS, **options)[1]


def fori_loop(n: Any, step: Any, init: Any, **options: Any) -> Any:
    return lx.fori_loop(0, n, lambda _, c: step(c), init, max_steps=STEPS, **options)


def scan(n: Any, step: Any, init: Any, **options: Any) -> Any:
    return lx.scan(lambda c, _: (step(c), None), init, jnp.arange(STEPS), n, **options)[0]


EACH_LOOP = pytest.mark.parametrize("loop", [while_loop, fori_loop, scan])


def values(*objects: Any) -> list[np.ndarray]:
    """All that objects hold, typed keys as integers."""
    leaves = jax.tree.leaves([nnx.split(x, graph=True)[1] if not isinstance(x, jax.Array) else x for x in objects])
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def same(actual: Any, expected: Any) -> None:
    actual, expected = values(*actual), values(*expected)
    assert [(a.shape, a.dtype) for a in actual] == [(e.shape, e.dtype) for e in expected]
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-12)


def unchanged(model: Any, make: Callable[[], Any]) -> None:
    same([model], [make()])


# ---- the caller's objects


@EACH_LOOP
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit])
def test_objects_are_updated_in_place(loop: Any, jit: Any) -> None:
    model = Cell()
    y = jit(lambda model, x: loop(STEPS, apply, (model, x))[1])(model, X)
    same((model, y), python(STEPS, Cell(), X))
    assert model.count[...] == STEPS


@EACH_LOOP
def test_the_result_carries_the_same_objects(loop: Any) -> None:
    model, counter, rngs = Cell(), Counter(), nnx.Rngs(0)
    kernel, number = model.linear.kernel, counter.count

    def step(carry: Any) -> Any:
        count(carry["counter"])
        return {**carry, "x": [carry["model"](carry["x"][0]) + carry["rngs"].normal(())]}

    out = loop(STEPS, step, {"model": model, "counter": counter, "rngs": rngs, "x": [X], "n": counter.count})
    assert out["model"] is model
    assert out["counter"] is counter
    assert out["rngs"] is rngs
    assert out["n"] is number
    assert model.linear.kernel is kernel
    assert counter.count is number
    assert (counter.count[...], rngs.default.count[...]) == (STEPS, STEPS)


def test_a_module_a_variable_and_rngs_alone_in_the_carry() -> None:
    counter, variable, rngs = Counter(), nnx.Param(jnp.float64(1)), nnx.Rngs(7)

    def double(_: Any, x: Any) -> Any:
        x[...] *= 2
        return x

    def draw(rngs: Any, _: Any) -> Any:
        return rngs, rngs.uniform()

    assert lx.fori_loop(0, 3, lambda _, c: count(c), counter) is counter
    assert lx.fori_loop(0, 3, double, variable) is variable
    assert (counter.count[...], variable[...]) == (3, 8.0)
    assert len(set(lx.scan(draw, rngs, length=STEPS)[1].tolist())) == STEPS
    assert rngs.default.count[...] == STEPS


def test_no_steps_change_nothing() -> None:
    model = Cell()
    result, y = jax.jit(lambda n, x: fori_loop(n, apply, (lx.local(Cell()), x)))(0, X)
    same((result, y), (model, X))
    assert fori_loop(0, apply, (model, X))[0] is model
    unchanged(model, Cell)


def test_conditions_see_objects_and_may_change_them() -> None:
    def goes_on(counter: Any) -> Any:
        return count(counter).count[...] < 10

    counter = Counter()
    assert lx.while_loop(goes_on, count, counter) is counter
    assert counter.count[...] == 11  # 0, then 1 2, 3 4, ...: as the Python loop has it
    counter = Counter()
    stop = lambda counter, _: count(counter).count[...] >= 5
    (_, ys), info = lx.scan(lambda c, _: (count(c), c.count[...]), counter, length=9, stop=stop, info=True)
    assert (counter.count[...], info.num_steps, ys.tolist()) == (6, 3, [1, 3, 5, 0, 0, 0, 0, 0, 0])


def test_what_the_body_leaves_alone_is_not_written() -> None:
    """So it may belong to an outer trace."""
    model = nnx.Linear(SIZE, SIZE, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    kernel = model.kernel.get_raw_value()

    @jax.jit
    def last(x: Any) -> Any:
        out, x = fori_loop(STEPS, apply, (model, x))
        assert out is model
        return x

    y = last(X)
    assert model.kernel.get_raw_value() is kernel
    np.testing.assert_allclose(y, python(STEPS, model, X)[1])


def test_info_and_run_time_checks() -> None:
    counter = Counter()
    goes_on = lambda c: c.count[...] < 7
    out, info = lx.while_loop(goes_on, count, counter, max_steps=3, throw=False, info=True)
    assert out is counter
    assert (counter.count[...], info.num_steps, info.limit_reached) == (3, 3, True)
    out, _ = lx.while_loop(goes_on, count, counter, max_steps=9, info=True)
    assert (out is counter, counter.count[...]) == (True, 7)
    with pytest.raises(Exception, match="max_steps=2 stopped"):
        lx.while_loop(goes_on, count, Counter(), max_steps=2)


class Holder(nnx.Module):
    """Leaves that are not Variables, Variables that hold no array, and metadata."""

    def __init__(self) -> None:
        self.array = jnp.zeros(2)
        self.number = nnx.data(1.0)
        self.layers = nnx.List([Counter(1), Counter(2)])
        self.table = nnx.Variable({"a": jnp.float64(1), "b": None})
        self.nothing = nnx.Variable(None)
        self.flag = nnx.Variable(True)
        self.weak = nnx.Variable(jnp.asarray(1.0))
        self.tagged = nnx.Param(jnp.float64(1), note="kept")
        self.pair = nnx.data((jnp.float64(0), {"b": jnp.float64(1)}))
        self.name = "holder"


def test_everything_that_a_module_may_hold() -> None:
    def step(_: Any, holder: Any) -> Any:
        assert (holder.name, holder.flag.get_value(), holder.nothing.get_value()) == ("holder", True, None)
        holder.array = holder.array + 1.0
        holder.pair = (holder.pair[1]["b"], {"b": holder.pair[0] + 1.0})
        holder.layers[1].count[...] += holder.layers[0].count[...]
        holder.table["a"] = holder.table["a"] * 2.0
        holder.tagged[...] += 1.0
        holder.weak[...] = holder.weak[...] * holder.number
        return holder

    holder = Holder()
    layers, table = holder.layers, holder.table
    assert lx.fori_loop(0, 3, step, holder) is holder
    assert holder.layers is layers
    assert holder.table is table
    assert (holder.array.tolist(), layers[1].count[...], table["a"], holder.tagged[...]) == ([3.0, 3.0], 5, 8.0, 4.0)
    assert holder.pair == (2.0, {"b": 2.0})
    assert (type(holder.number), holder.flag.get_value(), holder.nothing.get_value()) == (float, True, None)
    assert (holder.weak[...].weak_type, holder.tagged.get_metadata("note")) == (True, "kept")


# ---- shared references


class Tied(nnx.Module):
    """Two names for one Variable, and an object that holds its owner."""

    def __init__(self) -> None:
        self.a = nnx.Param(jnp.float64(1))
        self.b = self.a
        self.cycle = nnx.List([self])


@EACH_LOOP
def test_shared_references(loop: Any) -> None:
    tied = Tied()

    def step(carry: Any) -> Any:
        first, (second, alone) = carry
        assert first is second
        assert first.a is first.b
        assert first.a is alone
        assert first.cycle[0] is first
        first.a[...] *= 2.0
        alone[...] += second.b[...]
        return carry

    out, (again, alone) = loop(STEPS, step, (tied, (tied, tied.a)))
    assert out is again
    assert out is tied
    assert alone is tied.a
    assert tied.a is tied.b
    assert tied.a[...] == 4.0**STEPS


def test_gradient_of_a_shared_variable() -> None:
    def loss(a: Any, run: Any) -> Any:
        tied = Tied()
        tied.a[...] = a

        def step(_: Any, carry: Any) -> Any:
            tied, x = carry
            return tied, tied.a[...] * jnp.sin(tied.b[...] * x)

        return run(0, STEPS, step, (tied, jnp.float64(0.5)))[1]

    loop = lambda low, high, f, c: [c := f(i, c) for i in range(low, high)][-1]
    for gradient in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(gradient(loss)(1.5, lx.fori_loop), jax.grad(loss)(1.5, loop))


# ---- derivatives


def loss_of(run: Any, model: Any, x: Any) -> Any:
    model, y = run(model, x)
    return (y**2).sum() + model.mean[...]


@EACH_KIND
@EACH_LOOP
def test_gradients(loop: Any, kind: Any) -> None:
    """Those of the Python loop: the masks of the forward pass are those of the backward pass."""
    if kind == "lax":
        loop = lambda n, step, init, kind: lx.fori_loop(0, n, lambda _, c: step(c), init, kind=kind)
    model, plain = Cell(), Cell()
    run = lambda model, x: loop(STEPS, apply, (model, x), kind=kind)
    value, gradient = nnx.jit(nnx.value_and_grad(partial(loss_of, run)))(model, X)
    expected = nnx.value_and_grad(partial(loss_of, partial(python, STEPS)))(plain, X)
    np.testing.assert_allclose(value, expected[0])
    same([nnx.state(gradient)], [nnx.state(expected[1])])
    same([model], [plain])


def test_gradient_under_jax_grad() -> None:
    """Of a module as the pytree that it is."""
    graph, params, rest = nnx.split(Cell(), nnx.Param, ...)
    loss = lambda params, run: loss_of(run, nnx.merge(graph, params, rest, copy=True), X)
    run = lambda model, x: scan(STEPS, apply, (model, x))
    gradient = jax.jit(jax.grad(loss), static_argnums=1)(params, run)
    same([gradient], [jax.grad(loss)(params, partial(python, STEPS))])


def test_hessians() -> None:
    def loss(kernel: Any, run: Any) -> Any:
        model = Cell()
        model.linear.kernel[...] = kernel
        return loss_of(run, model, X)

    kernel = Cell().linear.kernel[...]
    run = lambda model, x: while_loop(STEPS, apply, (model, x))
    expected = jax.jit(jax.hessian(loss), static_argnums=1)(kernel, partial(python, STEPS))
    for hessian in (jax.hessian, lambda f: jax.jacrev(jax.jacrev(f)), lambda f: jax.jacrev(jax.jacfwd(f))):
        np.testing.assert_allclose(jax.jit(hessian(loss), static_argnums=1)(kernel, run), expected, rtol=1e-9)


def test_training_with_an_optimizer_in_the_carry() -> None:
    """The body takes gradients, and changes two objects that are tied to each other."""

    def step(carry: Any, x: Any) -> Any:
        model, optimizer = carry
        loss, gradient = nnx.value_and_grad(lambda model: ((model(x) - 1.0) ** 2).sum())(model)
        optimizer.update(model, gradient)
        return carry, loss

    def start() -> Any:
        model = Cell()
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    xs = jnp.arange(12.0).reshape(4, 3)
    objects, expected = start(), start()
    _, losses = nnx.jit(lambda objects, xs: lx.scan(step, objects, xs))(objects, xs)
    plain = [step(expected, x)[1] for x in xs]
    np.testing.assert_allclose(losses, plain)
    same(objects, expected)
    assert objects[1].step[...] == 4


# ---- batches


COUNTS = jnp.array([3, 0, 4, 1], jnp.int32)
KEYS = jax.random.split(jax.random.key(1), 4)
XS = jnp.stack([X, 2.0 * X, -X, X + 1.0])


def lane(loop: Any, options: Any, model: Any, n: Any, x: Any) -> Any:
    model, y = loop(n, apply, (lx.local(model), x), **options)
    return y, model.count[...], model.mean[...]


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
@EACH_LOOP
def test_one_module_for_lanes_with_counts_of_their_own(loop: Any, lanes: Any) -> None:
    """Each has its own statistics and dropout counter; the module that they share stays as it is."""
    model = Cell()
    run = partial(lane, loop, {"lanes": lanes})
    for vmap in (jax.vmap, nnx.vmap):
        y, counts, means = vmap(run, in_axes=(None, 0, 0))(model, COUNTS, XS)
        expected = [python(int(n), Cell(), x) for n, x in zip(COUNTS, XS, strict=True)]
        np.testing.assert_allclose(y, jnp.stack([y for _, y in expected]))
        np.testing.assert_allclose(means, jnp.stack([m.mean[...] for m, _ in expected]))
        assert counts.tolist() == COUNTS.tolist()
        unchanged(model, Cell)


@EACH_KIND
def test_gradient_of_shared_weights_over_lanes(kind: Any) -> None:
    if kind == "lax":
        return

    def loss(model: Any, run: Any) -> Any:
        return sum((y**2).sum() + mean.sum() for y, _, mean in run(model))

    model, options = Cell(), {"kind": kind, "lanes": "compact"}
    batched = lambda model: [nnx.vmap(partial(lane, fori_loop, options), in_axes=(None, 0, 0))(model, COUNTS, XS)]

    def apart(model: Any) -> Any:
        for n, x in zip(COUNTS, XS, strict=True):
            copy, y = python(int(n), nnx.clone(model), x)
            yield y, copy.count[...], copy.mean[...]

    gradients = [nnx.grad(partial(loss, run=run))(model) for run in (batched, apart)]
    same([nnx.state(gradients[0])], [nnx.state(gradients[1])])


def test_a_module_for_each_lane() -> None:
    """`nnx.vmap` hands out and takes back what the loop of each lane has changed in place."""
    models = nnx.vmap(Cell)(KEYS)
    run = nnx.vmap(lambda model, n, x: while_loop(n, apply, (model, x))[1])
    y = nnx.jit(run)(models, COUNTS, XS)
    for i, (n, x) in enumerate(zip(COUNTS, XS, strict=True)):
        expected, last = python(int(n), Cell(KEYS[i]), x)
        np.testing.assert_allclose(y[i], last)
        np.testing.assert_allclose(models.mean[i], expected.mean[...])
    assert models.count[...].tolist() == COUNTS.tolist()


def nested(model: Any, n: Any, x: Any, **options: Any) -> Any:
    inner = lambda m: lambda _, c: lx.fori_loop(0, m, lambda _, c: apply(c), c, max_steps=2)
    (model, x), _ = lx.scan(lambda c, m: (inner(m)(0, c), None), (model, x), jnp.array([2, 1, 0, 2]), n, **options)
    return model.count[...], x


@pytest.mark.parametrize("lanes", ["lockstep", "compact", "free"])
def test_nested_loops(lanes: Any) -> None:
    model = Cell()
    run = lambda model, n, x: nested(lx.local(model), n, x, lanes=lanes)
    counts, y = nnx.jit(nnx.vmap(run, in_axes=(None, 0, 0)))(model, COUNTS, XS)
    expected = [python(sum([2, 1, 0, 2][: int(n)]), Cell(), x) for n, x in zip(COUNTS, XS, strict=True)]
    np.testing.assert_allclose(y, jnp.stack([y for _, y in expected]))
    assert counts.tolist() == [3, 0, 5, 2]
    unchanged(model, Cell)


def test_nested_loops_update_the_callers_object() -> None:
    model, plain = Cell(), Cell()
    assert nested(model, 4, X)[0] == 5
    python(5, plain, X)
    same([model], [plain])


# ---- rows


def stack() -> Any:
    return nnx.vmap(Cell)(KEYS)


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_in_xs(reverse: bool) -> None:
    """Rows are modules; what the body changes in them is in the stacked module afterwards."""
    layers = stack()
    kernel, dropout = layers.linear.kernel, layers.dropout
    y, _ = lx.scan(lambda x, layer: (layer(x), None), X, layers, reverse=reverse)
    x, order = X, range(3, -1, -1) if reverse else range(4)
    for i in order:
        one, x = python(1, Cell(KEYS[i]), x)
        np.testing.assert_allclose(layers.mean[i], one.mean[...])
    np.testing.assert_allclose(y, x)
    assert layers.count[...].tolist() == layers.dropout.rngs.count[...].tolist() == [1] * 4
    assert layers.linear.kernel is kernel
    assert layers.dropout is dropout


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_that_are_not_reached_stay_as_they_are(reverse: bool) -> None:
    layers = nnx.vmap(Counter)(jnp.arange(5, dtype=jnp.int32) * 10)
    stop = lambda x, _: x >= 2
    f = lambda x, layer: (x + 1, count(layer).count[...])
    _, ys = lx.scan(f, 0, layers, jnp.int32(4), reverse, stop=stop)
    expected = [0, 10, 21, 31, 40] if reverse else [1, 11, 20, 30, 40]
    assert layers.count[...].tolist() == expected
    assert ys.tolist() == ([0, 0, 21, 31, 0] if reverse else [1, 11, 0, 0, 0])


class Sowing(Cell):
    """A cell that says what it saw."""

    def __call__(self, x: Any) -> Any:
        self.sow(nnx.Intermediate, "seen", x)
        return super().__call__(x)


@pytest.mark.parametrize("reverse", [False, True])
def test_what_layers_sow_is_stacked(reverse: bool) -> None:
    """A Variable in a row may come to hold what it did not hold before."""
    layers = nnx.vmap(Sowing)(KEYS)
    f = lambda x, layer: (layer(x), x)
    run = lambda layers: lx.scan(f, X, layers, jnp.int32(3), reverse)
    (_, xs), sown = nnx.capture(run, nnx.Intermediate)(layers)
    np.testing.assert_array_equal(sown["seen"][0], xs)
    assert not np.asarray(xs)[3].any()


def test_gradient_of_what_layers_sow() -> None:
    def loss(layers: Any, run: Any) -> Any:
        sown: Any = nnx.capture(lambda layers: run(X, layers), nnx.Intermediate)(nnx.clone(layers))[1]
        return (sown["seen"][0] ** 2).sum()

    f = lambda x, layer: (layer(x), None)
    gradients = [nnx.grad(partial(loss, run=run))(nnx.vmap(Sowing)(KEYS)) for run in (partial(lx.scan, f), nnx.scan(f))]
    same([nnx.state(gradients[0])], [nnx.state(gradients[1])])


def test_values_of_rows_that_change_their_containers() -> None:
    """Rows that are not reached keep what they had; what is new is zero in them."""

    def f(carry: Any, row: Any) -> tuple[Any, Any]:
        row.set_value({"a": row["a"] + 1, "new": (carry,)})
        return carry + 2, None

    variable = nnx.Variable({"a": jnp.arange(3.0), "old": jnp.ones(3)})
    lx.scan(f, 1.0, variable, 2)
    value = variable.get_value()
    assert value.keys() == {"a", "new"}
    assert value["a"].tolist() == [1, 2, 2]
    assert value["new"][0].tolist() == [1, 3, 0]
    with pytest.raises(TypeError, match=r"got bool.*, expected float64"):
        lx.scan(lambda c, row: (row.set_value(row[...] > 0), None), None, nnx.Variable(jnp.ones(3)))


def test_new_values_of_rows_need_a_static_number_of_rows() -> None:
    def put(carry: Any, row: Any) -> tuple[Any, Any]:
        row["a"] = carry
        return carry + 1, None

    def run(length: Any, **options: Any) -> Any:
        variable = nnx.Variable({})
        lx.scan(put, 0, variable, length, **options)
        return variable["a"]

    assert run(3).tolist() == [0, 1, 2]
    assert jax.jit(partial(run, max_steps=4))(3).tolist() == [0, 1, 2, 0]
    with pytest.raises(ValueError, match="no static capacity for NNX objects in xs"):
        jax.jit(run)(3)


def test_gradient_of_stacked_layers() -> None:
    def scanned(layers: Any) -> Any:
        return (lx.scan(lambda x, layer: (layer(x), None), X, layers)[0] ** 2).sum()

    def looped(layers: Any) -> Any:
        graph, state = nnx.split(layers)
        x = X
        for i in range(4):
            x = nnx.merge(graph, jax.tree.map(lambda v, i=i: v[i], state))(x)
        return (x**2).sum()

    gradients = [nnx.grad(loss)(stack()) for loss in (scanned, looped)]
    same([nnx.state(gradients[0])], [nnx.state(gradients[1])])


def test_modules_in_ys() -> None:
    """Each row is a copy of what the object was at that step."""
    counter = Counter()
    _, ys = lx.scan(lambda c, _: (count(c), {"module": c, "variable": c.count}), counter, length=3)
    assert type(ys["module"]) is Counter
    assert ys["module"] is not counter
    assert ys["module"].count is ys["variable"]
    assert ys["variable"][...].tolist() == [1, 2, 3]
    assert counter.count[...] == 3


# ---- randomness


def mask(carry: Any, _: Any) -> Any:
    dropout, x = carry
    dropped = dropout(jnp.ones(64))
    return (dropout, x * dropped), dropped > 0


def test_every_step_has_a_dropout_mask_of_its_own() -> None:
    dropout: Any = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    _, masks = nnx.jit(lambda dropout: lx.scan(mask, (dropout, jnp.ones(64)), length=8))(dropout)
    assert len({tuple(row.tolist()) for row in masks}) == 8
    assert dropout.rngs.count[...] == 8


def test_masks_of_the_backward_pass_are_those_of_the_forward_pass() -> None:
    """The derivative of a product of masks is the product of masks."""

    def last(x: Any, dropout: Any, kind: Any) -> Any:
        return lx.fori_loop(0, 3, lambda _, c: mask(c, None)[0], (dropout, x), kind=kind)[1]

    for kind in KINDS:
        x, dropout = jnp.ones(64), nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        y, pull = jax.vjp(lambda x, dropout=dropout, kind=kind: last(x, lx.local(dropout), kind), x)
        assert jnp.any(y > 0)
        np.testing.assert_array_equal(pull(jnp.ones(64))[0], y)


def test_lanes_with_rngs_of_their_own() -> None:
    """From a key for each lane; lanes that share one draw the same."""

    def lane(key: Any, n: Any) -> Any:
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(key))
        return lx.scan(mask, (dropout, jnp.ones(64)), jnp.arange(4), n)[1]

    masks = jax.vmap(lane, in_axes=(0, None))(jax.random.split(jax.random.key(0), 4), 4).reshape(16, 64)
    assert len({tuple(row.tolist()) for row in masks}) == 16
    shared = jax.vmap(lane, in_axes=(None, 0))(jax.random.key(0), COUNTS)
    for row, n in zip(shared, COUNTS, strict=True):
        np.testing.assert_array_equal(row[:n], shared[2, :n])


# ---- metadata of rows


def stacked_weight(**metadata: Any) -> Any:
    return nnx.Param(jnp.ones((STEPS, SIZE)), eager_sharding=False, **metadata)


def test_a_row_may_lose_the_name_of_its_first_axis() -> None:
    def step(x: Any, weight: Any) -> Any:
        nnx.spmd.remove_axis(weight, 0, {nnx.PARTITION_NAME: "layers", "nickname": "nick"})
        assert (weight.out_sharding, weight.nickname) == (("in",), ("i",))
        weight[...] *= 2.0
        return x * weight[...], None

    names = {"out_sharding": ("layers", "in"), "nickname": ("nick", "i")}
    weight = stacked_weight(**names)
    x, _ = lx.scan(step, X, weight, length=2)
    assert jnp.array_equal(x, 4 * X)
    assert jnp.array_equal(weight[:, 0], jnp.array([2.0, 2.0, 1.0, 1.0]))
    assert {name: getattr(weight, name) for name in names} == names


@pytest.mark.parametrize("after", [("x",), ("layers", "in", "x"), (), None, "in"])
def test_other_changes_of_metadata_in_rows_are_refused(after: Any) -> None:
    def step(x: Any, weight: Any) -> Any:
        weight.set_metadata(out_sharding=after)
        return x, None

    with pytest.raises(TypeError, match=r"(?s)must keep the structure.*got Param.*expected Param"):
        lx.scan(step, X, stacked_weight(out_sharding=("layers", "in")))


def test_changes_of_metadata_in_the_carry_are_refused() -> None:
    def step(_: Any, weight: Any) -> Any:
        nnx.spmd.remove_axis(weight, 0, {nnx.PARTITION_NAME: "layers"})
        return weight

    with pytest.raises(TypeError, match="must keep the structure"):
        lx.fori_loop(0, 2, step, stacked_weight(out_sharding=("layers", "in")))


# ---- what is refused


def replace(carry: Any) -> Any:
    carry["model"].linear.kernel = nnx.Param(carry["model"].linear.kernel[...])
    return carry


def alias(carry: Any) -> Any:
    carry["model"].mean = carry["other"].mean
    return carry


def attribute(carry: Any) -> Any:
    carry["model"].extra = nnx.Variable(jnp.float64(0))
    return carry


def delete(carry: Any) -> Any:
    del carry["other"].linear.bias
    return carry


def mode(carry: Any) -> Any:
    carry["model"].eval()
    return carry


def metadata(carry: Any) -> Any:
    carry["model"].count.set_metadata(note="new")
    return carry


REFUSED = {
    "another Variable": (replace, r"\['model'\].linear.kernel: got another Param"),
    "aliased": (alias, r"\['other'\].mean: got the object at .*\['model'\].mean, expected BatchStat"),
    "new attribute": (attribute, r"\['model'\].extra: Variable is new in the result"),
    "deleted attribute": (delete, r"\['other'\].linear.bias: Param is missing from the result"),
    "other mode": (mode, r"\['model'\].dropout.deterministic: got True, expected False"),
    "metadata": (metadata, r"\['model'\].count: got Variable \(note='new'\), expected Variable"),
    "swapped": (lambda c: {"model": c["other"], "other": c["model"]}, r"\['model'\]: got another Cell"),
    "another type": (lambda c: {**c, "model": Counter()}, r"\['model'\]: got Counter, expected Cell"),
    "no module": (lambda c: {**c, "model": 1.0}, r"\['model'\]"),
    "changed and replaced": (
        lambda c: {**c, "model": (c["model"](X), nnx.clone(c["model"]))[1]},
        r"\['model'\].count: changed, but the object is not returned",
    ),
    "shape": (lambda c: (c["model"].mean.set_value(X), c)[1], r"\['model'\].mean: got float64\[3\], expected float64"),
}


@EACH_LOOP
@pytest.mark.parametrize("case", REFUSED)
def test_changes_of_structure_and_references_are_refused(loop: Any, case: str) -> None:
    step, message = REFUSED[case]
    model, other = Cell(), Cell(1)
    with pytest.raises(TypeError, match=message):
        loop(STEPS, step, {"model": model, "other": other})
    unchanged(model, Cell)
    unchanged(other, lambda: Cell(1))


def test_a_variable_that_changes_in_the_carry_and_in_xs() -> None:
    """Each of them would be lost in the other; one that changes in one place only has that change."""
    f = lambda carry, row: (count(carry), count(row).count[...])
    both = Counter(jnp.arange(3))
    with pytest.raises(TypeError, match=r"\.count of the carry is \[0\]\.count of xs"):
        lx.scan(lambda c, row: f(c, row[0]), both, [both])
    assert both.count[...].tolist() == [0, 1, 2]
    _, ys = lx.scan(f, lx.local(both), both)
    assert both.count[...].tolist() == ys.tolist() == [1, 2, 3]
    lx.scan(lambda c, row: (c, count(row).count[...]), both, both)
    assert both.count[...].tolist() == [2, 3, 4]


def test_new_objects_of_the_same_structure_are_the_result() -> None:
    """As in the Python loop, the caller's objects are then left alone."""

    def descend(_: Any, params: Any) -> Any:
        return jax.tree.map(lambda p: p - 0.1, params)

    model = nnx.Linear(2, 2, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    before, params = model.kernel[...], nnx.state(model)
    for start in (params, model):
        out = lx.fori_loop(0, 3, descend, start)
        assert type(out) is type(start)
        kernel: Any = out.kernel
        assert kernel is not model.kernel
        np.testing.assert_allclose(kernel[...], before - 0.3)
        assert model.kernel[...].tolist() == before.tolist()


@EACH_LOOP
def test_an_object_of_an_outer_trace_that_the_body_changes(loop: Any) -> None:
    model, rngs = Counter(), nnx.Rngs(0)
    for step in (lambda x: x + count(model).count[...], lambda x: x + rngs.uniform()):
        with pytest.raises(TraceContextError, match=r"body_fun|f of scan") as caught:
            loop(STEPS, step, jnp.float64(0))
        assert "loopax.local" in str(caught.value)
        assert "carry" in str(caught.value)
        assert isinstance(caught.value.__cause__, TraceContextError)
    with pytest.raises(TraceContextError, match=r"loopax\.local") as caught:
        lx.fori_loop(0, 2, lambda _, x: loop(STEPS, lambda x: x + count(model).count[...], x), jnp.int32(0))
    assert str(caught.value).count("loopax.local") == 1


@EACH_LOOP
def test_an_object_of_an_outer_trace_in_the_carry(loop: Any) -> None:
    counter = Counter()
    with pytest.raises(TraceContextError, match=r"changes.*after the loop.*loopax.local"):
        jax.vmap(lambda n: loop(n, count, counter).count[...])(COUNTS)
    assert jax.vmap(lambda n: loop(n, count, lx.local(counter)).count[...])(COUNTS).tolist() == COUNTS.tolist()
    assert counter.count[...] == 0


def test_local() -> None:
    tied = Tied()
    copy, (again, x) = lx.local((tied, (tied.b, X)))
    assert copy is not tied
    assert copy.a is copy.b
    assert copy.a is again
    assert copy.a is not tied.a
    assert x is X
    copy.a[...] = jnp.float64(5)
    assert tied.a[...] == 1.0
    for other in (X, {"x": X}, "module", None):
        with pytest.raises(TypeError, match=r"local\(module\): got .*, expected a Flax NNX object"):
            lx.local(other)


def test_items_of_lanes_map() -> None:
    layers = stack()
    run = lambda layer: lx.fori_loop(0, 2, lambda _, c: apply(c), (layer, X))
    _, ys = lx.lanes_map(lambda layer: run(lx.local(layer)), layers, lanes=2)
    np.testing.assert_allclose(ys, jnp.stack([python(2, Cell(key), X)[1] for key in KEYS]))
    with pytest.raises(TypeError, match="f of lanes_map changes an NNX object"):
        lx.lanes_map(lambda layer: run(layer)[1], layers, lanes=2)


def test_variables_with_references_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="ref=True"):
        lx.fori_loop(0, 2, lambda _, c: c, nnx.Variable(jnp.zeros(2), ref=True))


# ---- what is traced


def test_disable_jit() -> None:
    model = Cell()
    with jax.disable_jit():
        _, y = fori_loop(STEPS, apply, (model, X))
    same((model, y), python(STEPS, Cell(), X))


def test_a_function_that_closes_over_a_module_sees_its_present_values() -> None:
    model = nnx.Param(jnp.float64(1))
    step = lambda _, x: x + model[...]
    assert lx.fori_loop(0, 2, step, jnp.float64(0)) == 2.0
    model[...] = jnp.float64(5)
    assert lx.fori_loop(0, 2, step, jnp.float64(0)) == 10.0


def test_a_body_is_traced_once_for_objects_of_the_same_structure() -> None:
    traces = []

    def step(_: Any, counter: Any) -> Any:
        traces.append(counter)
        return count(counter)

    for _ in range(3):
        lx.fori_loop(0, 2, step, Counter())
    assert len(traces) == 1


def test_a_module_as_body_is_traced_as_it_is_now() -> None:
    class Scale(nnx.Module):
        by = 2.0

        def __call__(self, _: Any, x: Any) -> Any:
            return self.by * x

    scale = Scale()
    assert lx.fori_loop(0, 2, scale, 1.0) == 4.0
    scale.by = 3.0
    assert lx.fori_loop(0, 2, scale, 1.0) == 9.0


def test_what_the_body_leaves_alone_is_a_constant_of_the_loop() -> None:
    program = jax.make_jaxpr(lambda model, x: lx.fori_loop(0, STEPS, lambda _, c: apply(c), (model, x))[1])(Cell(), X)
    (loop,) = [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "loop"]
    assert loop.params["num_carry"] == 4  # the count, the mean, the count of dropout, and x; but no key, and no weights


def shapes(jaxpr: Any) -> set[tuple[int, ...]]:
    """Of all intermediate values of a program, those of inner programs included."""
    inner = [p for eqn in jaxpr.eqns for p in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns"))]
    found = {v.aval.shape for eqn in jaxpr.eqns for v in [*eqn.invars, *eqn.outvars] if hasattr(v.aval, "shape")}
    return found.union(*(shapes(getattr(p, "jaxpr", p)) for p in inner if hasattr(getattr(p, "jaxpr", p), "eqns")))


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_weights_are_not_batched(lanes: Any) -> None:
    """32 lanes with counts of their own, a weight of 256 x 256 and a counter that changes: forward and gradient."""

    class Big(nnx.Module):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.zeros((256, 256), jnp.float32))
            self.count = nnx.Variable(jnp.int32(0))

        def __call__(self, x: Any) -> Any:
            self.count[...] += 1
            return jnp.tanh(x @ self.weight[...])

    def loss(model: Any, n: Any, x: Any) -> Any:
        def lane(model: Any, n: Any, x: Any) -> Any:
            _, x = lx.fori_loop(0, n, lambda _, c: apply(c), (lx.local(model), x), max_steps=STEPS, lanes=lanes)
            return (x**2).sum()

        return jax.vmap(lane, in_axes=(None, 0, 0))(model, n, x).sum()

    arguments = (Big(), jnp.arange(32, dtype=jnp.int32) % 5, jnp.ones((32, 256), jnp.float32))
    for program in (loss, jax.grad(loss, allow_int=True)):
        traced = jax.make_jaxpr(program)(*arguments)
        assert (256, 256) in shapes(traced.jaxpr)
        assert (32, 256) in shapes(traced.jaxpr)
        assert not [s for s in shapes(traced.jaxpr) if s[-2:] == (256, 256) and len(s) > 2]
        assert "f32[32,256,256]" not in str(traced)
        assert "32x256x256" not in jax.jit(program).lower(*arguments).as_text()


def test_flax_is_never_imported_for_the_user() -> None:
    program = "import sys, loopax as lx; print(lx.fori_loop(0, 3, lambda i, x: x + i, 0), 'flax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["3", "False"]
