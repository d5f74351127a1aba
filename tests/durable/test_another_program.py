"""A run goes on with the program that it was started with, and with no other unless it is asked to."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from loopax import durable
from tests.durable.cases import python, same_bits
from tests.support.reference import assert_close

X = jnp.array([1.0, -0.5, 2.0])
XS = jnp.asarray(np.random.RandomState(0).randn(20, 3))
OFTEN: dict[str, Any] = {"checkpoint_every": 4, "chunk_steps": 2}


def programs(directory: Path) -> dict[str, Any]:
    """Runs that differ in one thing from the first, with what the error says."""
    go = partial(durable.scan, directory=directory, chunk_steps=2, length=4)
    w = jnp.arange(3.0)
    f = lambda c, x, key: (jnp.sin(c) * w + x, c.sum())
    key = jax.random.key(0)
    at = lambda f=f, init=X, xs=XS, key=key, **o: partial(go, f, init, xs, key=key, **o)
    other_w = w + 1.0
    return {
        "same": (at(), ""),
        "body": (at(lambda c, x, key: (jnp.cos(c) * w + x, c.sum())), r"-x.* = sin .*\n(.*\n)*.*\+x.* = cos "),
        "number": (at(lambda c, x, key: (jnp.sin(c) * w + 2.0 * x, c.sum())), r"\+.* = mul 2.0:float64"),
        "closure": (at(lambda c, x, key: (jnp.sin(c) * other_w + x, c.sum())), r"closed-over value \d+, float64\[3\]"),
        "init": (at(init=X + 1), "first carry: other values"),
        "xs": (at(xs=XS.at[9, 2].add(1e-9)), "xs, array 0: other values"),
        "key": (at(key=jax.random.key(1)), "key: other values"),
        "rows": (at(xs=XS[:-1]), "rows of xs: stored 20, now 19"),
        "reverse": (at(reverse=True), "first row: stored 0, now 3"),
    }


def test_another_program_is_an_error_that_says_what_differs(tmp_path: Any) -> None:
    runs = programs(tmp_path)
    runs.pop("same")[0]()
    texts = {}
    for name, (run, message) in runs.items():
        with pytest.raises(ValueError, match=message) as error:
            run()
        texts[name] = str(error.value)
        assert 'give resume="anyway"' in texts[name]
    for name in ("init", "xs", "key", "closure"):
        assert texts[name].count("other values") == 1
        assert "the program" not in texts[name]
    assert "other values" not in texts["body"] + texts["number"]


def test_another_function_of_python_is_another_program(tmp_path: Any) -> None:
    shape = jax.ShapeDtypeStruct((3,), jnp.float64)

    def run(work: Any) -> Any:
        body = lambda _, x: jax.pure_callback(work, shape, x)
        return durable.fori_loop(0, 3, body, X, directory=tmp_path)

    result = run(lambda x: x * 2.0)
    with pytest.raises(ValueError, match=r"callback 0: stored (.*)<lambda>, now \1<lambda> with other code") as error:
        run(lambda x: x * 3.0)
    assert "the program (" not in str(error.value)
    same_bits(run(lambda x: x * 2.0), result)  # another function with the same code
    path = tmp_path / "program.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "python": "cpython 3.99"}))  # writes code in another way
    same_bits(run(lambda x: x * 3.0), result)


def test_checks_are_no_part_of_the_program(tmp_path: Any) -> None:
    """A run goes on without them, or with others."""

    def body(_: Any, x: Any, **options: Any) -> Any:
        return lx.while_loop(lambda x: x[0] < 3.0, lambda x: x + 1.0, x, max_steps=9, **options) * 0.5

    durable.fori_loop(0, 2, body, X, directory=tmp_path)
    result = durable.fori_loop(0, 4, partial(body, throw=False), X, directory=tmp_path)
    assert_close(result, lx.fori_loop(0, 4, body, X))


def test_anyway_goes_on_with_a_warning(tmp_path: Any) -> None:
    run = lambda factor, upper, **o: durable.fori_loop(0, upper, lambda _, x: x * factor, X, directory=tmp_path, **o)
    run(2.0, 3)
    with pytest.warns(durable.AnotherProgramWarning, match=r"going on with a run of another program:\n(.*\n)*.*3\.0"):
        result = run(3.0, 5, resume="anyway")
    assert_close(result, X * 8 * 9)
    assert_close(run(3.0, 6), X * 8 * 27)  # it is the program of this run now
    with pytest.raises(ValueError, match="one of another program"):
        run(2.0, 7)


def test_other_types_are_an_error_whatever_resume_says(tmp_path: Any) -> None:
    run = partial(durable.fori_loop, 0, 3, lambda _, x: x, directory=tmp_path, resume="anyway")
    run({"a": X})
    with pytest.raises(ValueError, match=r"carry\['a'\]: stored float64\[3\], now float32\[3\]"):
        run({"a": X.astype(jnp.float32)})
    with pytest.raises(ValueError, match=r"carry\['b'\]: stored nothing, now float64\[\]"):
        run({"a": X, "b": 1.0})
    with pytest.raises(ValueError, match=r"the loop: stored durable.fori_loop, now durable.while_loop"):
        durable.while_loop(lambda c: c["a"][0] < 0, lambda c: c, {"a": X}, directory=tmp_path)


def test_another_version_of_jax_and_other_formats(tmp_path: Any) -> None:
    run = partial(durable.fori_loop, 0, 3, lambda _, x: x * 2.0, X, directory=tmp_path)
    result = run()
    path = tmp_path / "program.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps({**stored, "jax": "0.1.2", "text": ["another text"]}))
    with pytest.raises(ValueError, match=rf"JAX: stored 0\.1\.2, now {jax.__version__}") as error:
        run()
    assert "-another text" in str(error.value)
    assert f"stored by loopax {lx.__version__} and JAX 0.1.2 (format 2), and this is" in str(error.value)
    with pytest.warns(durable.AnotherProgramWarning, match=r"JAX: stored 0\.1\.2"):
        same_bits(run(resume="anyway"), result)
    path.write_text(json.dumps({**stored, "jax": "0.1.2"}))  # the same program
    with pytest.warns(durable.AnotherProgramWarning, match=r"goes on under another version of JAX: stored 0\.1\.2"):
        same_bits(run(), result)
    assert json.loads(path.read_text()) == stored
    path.write_text(json.dumps({"format": 99, "loopax": "7.0"}))
    with pytest.raises(RuntimeError, match=r"has format 99, .*Go on with loopax 7\.0, or give another directory"):
        run()
    for garbage in ("", "{", "[]", "3", '{"format": 1}', "\0\xff", json.dumps({**stored, "more": 1})):
        path.write_text(garbage)
        with pytest.raises(RuntimeError, match="is no description of a run that loopax has written"):
            run(resume="anyway")
    path.write_text(json.dumps(stored))
    same_bits(run(), result)


class Model(eqx.Module):
    """A function in a model, one with an address in its text."""

    weight: Any
    activation: Any


@jax.custom_jvp
def softened(x: Any) -> Any:
    return jnp.tanh(x) * 0.9


softened.defjvp(lambda x, t: (softened(x[0]), t[0]))


@jax.custom_vjp
def halved(x: Any) -> Any:
    return x * 0.5


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (g,))


def run_everything(directory: Any, upper: int) -> Any:
    """A program whose text holds functions, callbacks, keys and NNX objects."""
    from flax import nnx

    module = nnx.Linear(3, 3, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    model = Model(jnp.eye(3), partial(jnp.clip, min=-2.0))
    key = jax.random.key(1)
    shape = jax.ShapeDtypeStruct((3,), jnp.float64)

    def body(i: Any, c: Any) -> Any:
        model, module, x = c
        x = model.activation(model.weight @ softened(halved(x))) + jax.random.normal(key, (3,))
        x = jax.pure_callback(lambda x: x * 2.0, shape, x) + jax.jit(jnp.cos)(x)
        x = jax.lax.cond(i > 2, lambda x: x + 1.0, lambda x: x, x)
        jax.debug.callback(lambda _: None, x)
        return model, module, x + module(x)

    return durable.fori_loop(0, upper, body, (model, module, X), directory=directory)[2]


FRESH = """
import sys, tests.conftest
import numpy as np
from tests.durable.test_another_program import run_everything
np.save(sys.argv[1] + ".npy", run_everything(sys.argv[1], 6))
"""


@pytest.mark.slow
def test_the_program_is_the_same_in_another_process(tmp_path: Any) -> None:
    expected = run_everything(tmp_path / "whole", 6)
    run_everything(tmp_path / "run", 3)
    done = python(FRESH, tmp_path / "run", PYTHONHASHSEED="77")
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "run.npy"), expected)


def test_values_that_inner_functions_close_over_count(tmp_path: Any) -> None:
    """Wherever JAX keeps them: in `jit`, `cond`, custom rules, loops in loops."""

    def run(directory: Any, number: float) -> Any:
        table = np.arange(3.0) + number
        array = jnp.asarray(table)

        @jax.custom_jvp
        def rule(x: Any) -> Any:
            return x + array

        rule.defjvp(lambda x, t: (rule(x[0]), t[0]))
        inner = {
            "jit": jax.jit(lambda x: x + table),
            "cond": lambda x: jax.lax.cond(x[0] > 0, lambda x: x + array, lambda x: x, x),
            "rule": rule,
            "scan": lambda x: lx.scan(lambda c, _: (c + array, None), x, length=2)[0],
            "lax": lambda x: jax.lax.fori_loop(0, 2, lambda _, c: c + table, x),
            "checkpoint": jax.checkpoint(lambda x: x * array),
        }[directory.name]
        return durable.fori_loop(0, 3, lambda _, x: inner(x), X, directory=directory)

    for name in ("jit", "cond", "rule", "scan", "lax", "checkpoint"):
        run(tmp_path / name, 1.0)
        with pytest.raises(ValueError, match="another program"):
            run(tmp_path / name, 1.5)
