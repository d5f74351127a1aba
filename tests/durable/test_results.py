"""Durable loops mean what loopax's loops mean, whatever the carry holds: any dtype, keys, models, objects."""

import gc
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import loopax as lx
from loopax import durable
from tests.durable.cases import SELDOM, bits, read_rows, same_bits, saves
from tests.support.compiled import compilations
from tests.support.reference import assert_close

X = jnp.array([1.0, -0.5, 2.0])
XS = jnp.asarray(np.random.RandomState(0).randn(11, 3))
KEY = jax.random.key(3)


def wave(i: Any, x: Any, xp: Any = jnp) -> Any:
    return xp.sin(x) * 1.5 + 0.1 * i


def summed(carry: Any, x: Any) -> Any:
    h, n = carry
    h = jnp.tanh(h + x)
    return (h, n + 1), {"h": h * 2.0, "more": [h.sum(), n, "kept", None, True]}


@pytest.fixture
def here(tmp_path: Any) -> Any:
    """Options of a durable run in several chunks."""
    return {"directory": tmp_path / "run", "chunk_steps": 3, "checkpoint_every": 1000}


LIMITS = {
    "static": (0, 10),
    "negative": (-5, 5),
    "backwards": (5, 2),
    "unsigned": (jnp.uint32(2), jnp.uint32(9)),
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_fori_loop(limits: Any, here: Any) -> None:
    lower, upper = limits

    def body(i: Any, carry: Any) -> Any:
        return wave(i.astype(float), carry[0]), carry[1] * 3 + i.astype(jnp.int64)

    init = (X, jnp.int64(1))
    actual, info = durable.fori_loop(lower, upper, body, init, info=True, **here)
    x, n, steps = np.asarray(X), 1, range(int(lower), int(upper))
    for i in steps:
        x, n = wave(float(i), x, np), n * 3 + i
    assert_close(actual, (x, np.int64(n)))
    assert (info.num_steps, info.limit_reached) == (len(steps), False)
    assert info.num_steps.dtype == np.int64


@pytest.mark.parametrize("start", [0, 9])
def test_while_loop(start: int, here: Any) -> None:
    body = lambda c: (c[0] + 1, wave(c[0].astype(float), c[1]))
    init = (jnp.asarray(start), X)
    actual, info = durable.while_loop(lambda c: c[0] < 8, body, init, info=True, **here)
    assert_close(actual, lx.while_loop(lambda c: c[0] < 8, body, init))
    assert (info.num_steps, info.limit_reached) == (max(8 - start, 0), False)


@pytest.mark.parametrize("name", ["while", "fori", "scan"])
def test_max_steps(name: str, here: Any) -> None:
    """An error as in loopax, or, with throw=False, what there is; more steps later go on."""
    loops: dict[str, Callable[..., Any]] = {
        "while": lambda lib, **o: lib.while_loop(lambda x: x[0] < 9, lambda x: x + 1.0, X, **o),
        "fori": lambda lib, **o: lib.fori_loop(0, 8, wave, X, **o),
        "scan": lambda lib, **o: lib.scan(lambda c, x: (c + x, None), X, XS, 8, **o),
    }
    loop = loops[name]
    with pytest.raises(ValueError if name != "while" else Exception, match="max_steps=5 stopped") as error:
        loop(durable, max_steps=5, **here)
    assert "durable." in str(error.value)
    actual, info = loop(durable, max_steps=5, throw=False, info=True, **here)
    expected, expected_info = loop(lx, max_steps=5, throw=False, info=True)
    assert_close(actual, expected)
    assert (info.num_steps, info.limit_reached) == (5, True) == tuple(map(int, expected_info[:2]))
    actual, info = loop(durable, max_steps=8, info=True, **here)
    assert_close(actual, loop(lx, max_steps=8))
    assert (info.num_steps, info.limit_reached) == (8, False)


SCANS = {
    "some rows, reverse": {"xs": XS, "length": 7, "reverse": True},
    "unroll": {"xs": XS, "unroll": 2},
    "stop": {"xs": XS, "stop": lambda c, _: c[1] >= 5},
    "stop, reverse": {"xs": XS, "stop": lambda c, y: y["more"][1] >= 5, "reverse": True},
    "bound": {"stop": lambda c, _: c[1] >= 5, "max_steps": 9},
    "no rows": {"xs": XS[:0]},
}


@pytest.mark.parametrize("options", SCANS.values(), ids=SCANS)
def test_scan(options: Any, here: Any) -> None:
    f = lambda carry, x: summed(carry, jnp.zeros(3) if x is None else x)
    (carry, ys), info = durable.scan(f, (X, 0), info=True, **options, **here)
    arrays = lambda ys: [ys["h"], *ys["more"][:2], ys["more"][4]]

    @jax.jit
    def whole() -> Any:
        (carry, ys), info = lx.scan(f, (X, 0), info=True, **options)
        return carry, arrays(ys), info.num_steps

    expected, expected_ys, steps = whole()
    assert_close((carry, arrays(read_rows(ys))), (expected, expected_ys))
    assert info.num_steps == int(steps)
    assert ys["more"][2:4] == ["kept", None]


def test_xs_are_a_pytree(here: Any) -> None:
    """With leaves that are not arrays, keys, and an array that stands in it twice."""
    xs = {"x": XS, "again": XS, "n": jnp.arange(11.0), "keys": jax.random.split(KEY, 11), "name": "sin", "on": True}

    def f(carry: Any, x: Any) -> Any:
        assert (x["name"], x["on"]) == ("sin", True)
        y = jnp.sin(carry) + x["x"] * x["n"] - x["again"] + jax.random.normal(x["keys"])
        return y, (y, x["keys"], x["name"])

    actual, expected = durable.scan(f, X, xs, reverse=True, **here), lx.scan(f, X, xs, reverse=True)
    (carry, ys), (expected_carry, expected_ys) = actual, expected
    assert_close(carry, expected_carry)
    assert_close(read_rows(ys[0]), expected_ys[0])
    same_bits(ys[1][:], expected_ys[1])
    assert ys[2] == "sin"


def test_keys_of_steps(here: Any) -> None:
    draw = lambda i, x, key: x * 0.5 + jax.random.normal(key, (3,))
    loops: dict[str, Callable[..., Any]] = {
        "fori": lambda lib, **o: lib.fori_loop(2, 9, draw, X, key=KEY, **o),
        "while": lambda lib, **o: lib.while_loop(
            lambda c: c[0] < 7, lambda c, key: (c[0] + 1, draw(0, c[1], key)), (0, X), key=jax.random.PRNGKey(3), **o
        ),
        "scan": lambda lib, **o: lib.scan(
            lambda c, x, key: (draw(0, c, key), jax.random.uniform(key)), X, XS, reverse=True, key=KEY, **o
        ),
    }
    for name, loop in loops.items():
        found = loop(durable, **here | {"directory": here["directory"] / name})
        assert_close(read_rows(found), loop(lx))


def test_a_result_that_stands_in_the_carry_twice(here: Any) -> None:
    """Memory that two leaves share could not be handed on twice; the caller's arrays stay, and nothing is kept."""
    before = len(jax.live_arrays())
    body = lambda _, c: (c[1], c[1], c[0] + c[2], c[3])
    init = (X, X, X, X)
    same_bits(durable.fori_loop(0, 8, body, init, **here), lx.fori_loop(0, 8, body, init))
    assert not X.is_deleted()
    gc.collect()
    assert len(jax.live_arrays()) <= before + 1


def test_a_check_in_the_body_stops_the_run_and_leaves_its_saves(here: Any) -> None:
    def body(i: Any, x: Any) -> Any:
        return lx.while_loop(lambda c: c[0] < i, lambda c: (c[0] + 1, c[1] + 1.0), (0, x), max_steps=5)[1]

    here |= {"chunk_steps": 2, "checkpoint_every": 2}
    with pytest.raises(Exception, match="max_steps=5 stopped"):
        durable.fori_loop(0, 9, body, X, **here)
    assert max(saves(here["directory"])) in (4, 6)
    result = durable.fori_loop(0, 6, body, X, **here)
    assert_close(result, lx.fori_loop(0, 6, body, X))


def test_results_do_not_depend_on_chunks_and_one_compilation_serves_all(tmp_path: Any) -> None:
    """A chunk is made of whole iterations, whatever the user or memory asks for."""
    traces = []

    def f(c: Any, _: Any) -> Any:
        traces.append(None)
        return jnp.sin(c) * 1.5 + 0.1, c

    for unroll in (1, 4):
        runs, counts = [], []
        for steps in (1, 7, 1000, None):
            traces.clear()
            path = tmp_path / f"{steps} {unroll}"
            with compilations() as compiled:
                found = durable.scan(f, X, length=25, unroll=unroll, directory=path, chunk_steps=steps, **SELDOM)
                runs.append(read_rows(found))
            counts.append(len(compiled))
            assert 1 <= len(traces) <= 2
        for run in runs[1:]:
            same_bits(run, runs[0])
        assert len(set(counts[1:])) == 1  # the first run compiles copies and checksums too


def test_without_64_bit_types(here: Any) -> None:
    with jax.enable_x64(False):
        f = lambda c, x: ({"x": jnp.sin(c["x"]) + x, "n": c["n"] + 1}, (c["x"].sum(), c["n"]))
        init = {"x": jnp.ones(3), "n": 0}
        assert init["x"].dtype == jnp.float32
        carry, ys = durable.scan(f, init, XS.astype(jnp.float32), **here)
        expected = lx.scan(f, init, XS.astype(jnp.float32))
        assert_close((carry, read_rows(ys)), expected, 1e-6)
        again, info = durable.scan(f, init, XS.astype(jnp.float32), info=True, **here)
        same_bits(again[0], carry)
        assert (info.num_steps, info.num_steps.dtype) == (11, np.int64)


@pytest.mark.parametrize("name", ["while_loop", "fori_loop", "scan"])
def test_the_arguments_are_those_of_loopax(name: str) -> None:
    """But for what says how a loop is differentiated and batched, which a durable one is not."""
    durable_only = {"directory", "checkpoint_every", "keep", "resume", "chunk_steps"}
    arguments = inspect.signature(getattr(durable, name)).parameters
    assert arguments.keys() == (inspect.signature(getattr(lx, name)).parameters.keys() | durable_only) - {
        "derivative",
        "kind",
        "lanes",
    }


def run(directory, length, progress, body=lambda _, x: x + 1):
    return durable.fori_loop(
        0, length, body, jnp.zeros(()), directory=directory, chunk_steps=10, progress=progress, checkpoint_every=500
    )


def test_a_line_at_the_end_which_says_after_how_many_steps_a_run_goes_on(tmp_path, capfd):
    """Also where it is finished; no line without `progress`."""
    assert run(tmp_path / "silent", 100, None) == 100
    assert capfd.readouterr().err == ""
    assert run(tmp_path / "run", 100, lx.Progress("training", style="text")) == 100
    assert re.search(r"^training: 100 steps in \S+, .* steps/s$", capfd.readouterr().err, re.MULTILINE)
    run(tmp_path / "run", 150, lx.Progress(style="text"))
    resumed = r"^durable.fori_loop: 50 steps in \S+, .* steps/s, after 100 that were saved$"
    assert re.search(resumed, capfd.readouterr().err, re.MULTILINE)
    run(tmp_path / "run", 150, lx.Progress("again", style="text"))
    assert capfd.readouterr().err == "again: 0 steps in 0:00:00, after 150 that were saved\n"


NAMES = "bool int2 int4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bfloat16 float16 float32 float64"
DTYPES = [*NAMES.split(), "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"]


def test_every_dtype(here: Any) -> None:
    """In the carry and in outputs, with arrays that have no elements, and scalars."""
    init: dict[str, Any] = {"none": jnp.zeros((0, 3)), "scalar": jnp.float32(1.5)}
    for name in DTYPES:
        init[name] = jnp.asarray((np.arange(-3, 4) % 7 - 3.0).astype(jnp.dtype(name)))
    step = lambda x: ~x if x.dtype == jnp.bool_ else (x + x.astype(x.dtype)).astype(x.dtype)
    f = lambda c, _: (jax.tree.map(step, c), c)
    expected = jax.jit(lambda: lx.scan(f, init, length=5))()
    types = lambda ys: jax.tree.map(lambda y: (y.shape, y.dtype), ys, is_leaf=lambda y: hasattr(y, "dtype"))
    for _ in range(2):  # the second time from disk
        carry, ys = durable.scan(f, init, length=5, **here)
        same_bits((carry, read_rows(ys)), expected)
        assert types(ys) == types(expected[1])


def test_weak_types_and_numbers_that_are_promoted(here: Any) -> None:
    init = {"n": 0, "x": 1.0, "flag": True, "z": 1j, "weak": jnp.asarray(2.0), "int": 1, "same": False}

    def body(_: Any, c: Any) -> Any:
        numbers = {"n": c["n"] + 1, "x": c["x"] * jnp.float32(0.5), "weak": c["weak"] * 0.5, "int": c["int"] * 1.5}
        return {**c, **numbers, "flag": c["n"] > 2}

    same_bits(durable.fori_loop(0, 5, body, init, **here), lx.fori_loop(0, 5, body, init))


@pytest.mark.parametrize(
    "init", [(), None, {"a": "text", "f": jnp.sin}, [jnp.zeros((0, 3))]], ids=["empty", "None", "dict", "list"]
)
def test_carries_without_numbers(init: Any, here: Any) -> None:
    for _ in range(2):
        same_bits(durable.fori_loop(0, 7, lambda _, c: c, init, **here), init)


def test_keys_in_the_carry(here: Any) -> None:
    def f(carry: Any, _: Any) -> Any:
        key, raw, x = carry
        key, use = jax.random.split(key)
        raw, other = jax.random.split(raw)
        return (key, raw, x + jax.random.normal(use) + jax.random.normal(other)), (use, x)

    init = (KEY, jax.random.PRNGKey(1), 0.0)
    carry, ys = durable.scan(f, init, length=8, **here)
    expected, expected_ys = lx.scan(f, init, length=8)
    same_bits(carry[:2], expected[:2])
    assert_close(carry[2], expected[2])
    same_bits(ys[0][:], expected_ys[0])


class Cell(nnx.Module):
    """Weights, a counter and dropout."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(3, 3, param_dtype=jnp.float64, rngs=rngs)
        self.count = nnx.Variable(jnp.int32(0))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        return x + 0.1 * self.dropout(jnp.tanh(self.linear(x)))


def test_nnx_objects_are_updated_in_place(here: Any) -> None:
    @nnx.jit
    def start() -> Any:
        model = Cell()
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def f(carry: Any, x: Any) -> Any:
        model, optimizer = carry
        loss, gradient = nnx.value_and_grad(lambda model: (model(x) ** 2).sum())(model)
        optimizer.update(model, gradient)
        return carry, loss

    objects, expected = start(), start()
    kernel = objects[0].linear.kernel
    carry, losses = durable.scan(f, objects, XS, **here)
    assert [a is b for a, b in zip(carry, objects, strict=True)] == [True, True]
    assert carry[0].linear.kernel is kernel
    (_, expected_losses) = nnx.jit(lambda objects, xs: lx.scan(f, objects, xs))(expected, XS)
    assert_close(read_rows(losses), expected_losses)
    assert_close(kernel[...], expected[0].linear.kernel[...])
    assert (carry[0].count[...], carry[1].step[...]) == (11, 11)
    again = start()  # the finished run gives its state to new objects
    assert durable.scan(f, again, XS, **here)[0][0] is again[0]
    state_of = lambda objects: [bits(x) for x in jax.tree.leaves([nnx.split(x)[1] for x in objects])]
    np.testing.assert_equal(state_of(again), state_of(objects))


def test_objects_of_a_run_that_failed_are_as_they_were(here: Any) -> None:
    def body(_: Any, model: Any) -> Any:
        model.count[...] += 1
        lx.while_loop(lambda n: n < model.count[...], lambda n: n + 1, jnp.int32(0), max_steps=5)
        return model

    model = Cell()
    with pytest.raises(Exception, match="max_steps=5 stopped"):
        durable.fori_loop(0, 9, body, model, **here)
    assert model.count[...] == 0
