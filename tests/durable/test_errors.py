"""What a durable loop refuses, and what it says then."""

import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax import durable
from tests.durable.cases import python, same_bits, saves

X = jnp.arange(3.0)
double = lambda _, x: x * 2.0


def run(directory: Any, **options: Any) -> Any:
    return durable.fori_loop(0, 4, double, X, directory=directory, **options)


# ---- arguments


WRONG: dict[str, tuple[Any, Any, str]] = {
    "every 0": ({"checkpoint_every": 0}, ValueError, r"checkpoint_every=...\): got 0, expected a positive number"),
    "every nan": ({"checkpoint_every": float("nan")}, ValueError, "got nan, expected a positive number of seconds"),
    "every inf": ({"checkpoint_every": float("inf")}, ValueError, "got inf, expected a positive number of seconds"),
    "every True": ({"checkpoint_every": True}, TypeError, "got True, expected an int"),
    "every text": ({"checkpoint_every": "1m"}, TypeError, "got '1m', expected an int .steps., a float .seconds."),
    "every no time": ({"checkpoint_every": timedelta(0)}, ValueError, "expected a positive number of seconds"),
    "keep 0": ({"keep": 0}, ValueError, r"keep=...\): got 0, expected at least 1"),
    "keep 1.5": ({"keep": 1.5}, TypeError, "got float 1.5, expected an int, the number of saves"),
    "resume": ({"resume": "alway"}, ValueError, r"resume=...\): got 'alway', expected 'auto' or 'anyway'"),
    "chunk_steps 0": ({"chunk_steps": 0}, ValueError, r"chunk_steps=...\): got 0, expected an int from 1 to"),
    "chunk_steps 1.0": ({"chunk_steps": 1.0}, TypeError, "expected an int, the steps of a compiled chunk"),
    "max_steps": ({"max_steps": -1}, ValueError, r"max_steps=...\): got -1, expected an int from 0 to 92233720368"),
    "kind": ({"kind": "auto"}, TypeError, "unexpected keyword argument 'kind'"),
    "key": ({"key": 3}, TypeError, "expected one PRNG key"),
    "unroll": ({"unroll": -2}, ValueError, "expected a positive int"),
}


def test_wrong_options(tmp_path: Any) -> None:
    for options, kind, message in WRONG.values():
        with pytest.raises(kind, match=message) as error:
            run(tmp_path / "run", **options)
        assert "fori_loop(" in str(error.value)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("number", [1.0, "4", True, jnp.float64(1)], ids=str)
def test_limits_and_lengths_that_are_no_integers(number: Any, tmp_path: Any) -> None:
    with pytest.raises(TypeError, match=r"durable\.fori_loop\(upper=...\): got .*, expected"):
        durable.fori_loop(0, number, double, X, directory=tmp_path)
    with pytest.raises(TypeError, match=r"durable\.scan\(length=...\): got .*, expected an int"):
        durable.scan(lambda c, x: (c, x), 0, X, number, directory=tmp_path)


def test_limits_that_the_index_cannot_hold(tmp_path: Any) -> None:
    """As in loopax: of the last index it depends, and of the dtype that the index has."""
    beyond = r"lower is .*, upper is .*, and one of them is beyond {}, .* use `durable\.while_loop`"
    with jax.enable_x64(False):
        loop = partial(durable.fori_loop, body_fun=lambda i, _: i, init_val=jnp.int32(0), directory=tmp_path)
        with pytest.raises(ValueError, match=r"upper=...\): got 2147483649. " + beyond.format("int32")):
            loop(0, 2**31 + 1)
        with pytest.raises(ValueError, match=r"lower=...\): got 3000000000. " + beyond.format("int32")):
            loop(jnp.uint32(3_000_000_000), jnp.uint32(3_000_000_005))
        assert loop(2**31 - 3, 2**31) == 2**31 - 1
    with pytest.raises(ValueError, match=r"lower=...\): got -9223372036854775809. " + beyond.format("int64")):
        durable.fori_loop(-(2**63) - 1, 0, double, X, directory=tmp_path)


def test_functions_and_pytrees_that_do_not_fit(tmp_path: Any) -> None:
    """As in loopax, by the names of durable loops."""
    scan = partial(durable.scan, directory=tmp_path)
    cases: list[tuple[Any, str]] = [
        (lambda: durable.while_loop(lambda x: x, lambda x: x, X, directory=tmp_path), "cond_fun of durable.while_loop"),
        (lambda: durable.fori_loop(0, 3, cast(Any, 7), X, directory=tmp_path), "body_fun of durable.fori_loop"),
        (lambda: durable.fori_loop(0, 3, lambda _, x: x[:2], X, directory=tmp_path), r"float64\[2\], exp"),
        (lambda: scan(lambda c, x: c, 0, X), "f of durable.scan must return a pair"),
        (lambda: scan(lambda c, x: (c, x), 0, X, 9), r"durable.scan\(length=...\): got 9, but xs has 3 rows"),
        (lambda: scan(lambda c, x: (c, x), 0), "durable.scan does not know how many steps"),
        (lambda: scan(lambda c, x: (c, c), 0, stop=lambda c, y: c > 2), "no static capacity for ys"),
    ]
    for call, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


# ---- transformations


def test_transformations_are_refused(tmp_path: Any) -> None:
    while_loop = lambda x: durable.while_loop(lambda x: x[0] < 0, lambda x: x, x, directory=tmp_path)
    fori = lambda x: run(tmp_path) + x
    scan = lambda x: durable.scan(lambda c, x: (c + x, None), jnp.float64(0), x, directory=tmp_path)[0]
    leaked: list[Any] = []
    jax.jit(leaked.append)(X)
    calls = [
        (jax.jit(while_loop), "while_loop"),
        (jax.jit(lambda x: durable.fori_loop(0, x[0].astype(int), double, X, directory=tmp_path)), "fori_loop"),
        (jax.vmap(lambda x: scan(X) + x), "scan"),
        (jax.grad(lambda x: fori(x).sum()), "fori_loop"),
        (lambda x: jax.lax.scan(lambda c, _: (fori(c), None), x, length=2)[0], "fori_loop"),
        (partial(jax.eval_shape, scan), "scan"),
        (lambda _: durable.fori_loop(0, 3, double, leaked[0], directory=tmp_path), "fori_loop"),
        (jax.jit(lambda x: durable.lanes_stream(lambda x: run(tmp_path), [x], directory=tmp_path)), "lanes_stream"),
    ]
    for call, name in calls:
        with pytest.raises(TypeError, match=f"durable.{name} saves to disk .* Call it outside of them, or call `loop"):
            call(X)
    assert list(tmp_path.iterdir()) == []


# ---- what cannot be saved


def test_leaves_that_cannot_be_saved_are_named(tmp_path: Any) -> None:
    from flax import nnx

    init = {"a": X, "b": [X.astype(jnp.uint4), X.astype(jnp.uint2)]}
    with pytest.raises(TypeError, match="dtypes TensorStore does not know") as error:
        durable.fori_loop(0, 3, lambda _, x: x, init, directory=tmp_path)
    assert "carry['b'][0]: uint4[3]\n  carry['b'][1]: uint2[3]\nConvert" in str(error.value)
    with pytest.raises(TypeError, match=r"outputs\['y'\]: uint4\[1\]"):
        durable.scan(lambda c, x: (c, {"y": x.astype(jnp.uint4)}), 0, X, directory=tmp_path)
    with pytest.raises(TypeError, match="returns NNX objects as outputs"):
        durable.scan(lambda c, _: (c, nnx.Variable(c)), X, length=3, directory=tmp_path)


# ---- the directory


def test_directories_that_cannot_be_written(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(FileExistsError, match=r"durable.fori_loop\(directory=...\) cannot be written to"):
        run(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="Give a directory in which this process may make files"):
        run(tmp_path / "file" / "under")
    for wrong in (None, 3, X):
        with pytest.raises(TypeError, match=r"durable.fori_loop\(directory=...\): got .*, expected a path"):
            run(wrong)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(Path, "touch", refuse)  # tests may run as one who may do everything
    with pytest.raises(PermissionError, match=r"cannot be written to: Permission denied.*closed"):
        run(tmp_path / "closed")


def test_links_that_lead_nowhere(tmp_path: Any) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, link, target in [("link", "link", "disk"), ("link/run", "link", "disk"), ("loop", "loop", "loop")]:
        with pytest.raises(FileNotFoundError, match=r"Make that directory .*, or remove") as error:
            run(tmp_path / name)
        expected = f"durable.fori_loop(directory=...) leads through a link to {tmp_path / target}, which is not there"
        assert expected in str(error.value)
        assert str(error.value).endswith(repr(str(tmp_path / link)))
        with pytest.raises(FileNotFoundError, match="leads through a link to"):
            durable.outputs(tmp_path / name)
        with pytest.raises(FileNotFoundError, match="leads through a link to"):
            durable.steps_saved(tmp_path / name)
    assert not (tmp_path / "disk").exists()
    (tmp_path / "disk").mkdir()
    run(tmp_path / "link")
    assert durable.steps_saved(tmp_path / "disk") == durable.steps_saved(tmp_path / "link") == 4


def test_paths(tmp_path: Any, monkeypatch: Any) -> None:
    """Of text, from the working directory and from home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    expected = run("one/two")
    assert (tmp_path / "one" / "two" / "saves").is_dir()
    same_bits(run("~/three"), expected)
    assert (tmp_path / "home" / "three" / "saves").is_dir()
    assert os.getcwd() == str(tmp_path)


def test_a_directory_in_use(tmp_path: Any) -> None:
    def body(_: Any, x: Any) -> Any:
        jax.debug.callback(lambda: run(tmp_path))
        return x

    def nested() -> None:
        durable.fori_loop(0, 3, body, X, directory=tmp_path)
        jax.effects_barrier()

    with pytest.raises(Exception, match=rf"is in use by another run \(process {os.getpid()}\)"):
        nested()


def test_without_orbax(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"orbax.checkpoint cannot be imported. Install it: .*loopax\[durable\]"):
        run(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match="tensorstore cannot be imported"):
        run(tmp_path)


# ---- writing that fails


FULL = """
import json, resource, signal, sys, tests.conftest
import jax, jax.numpy as jnp
from loopax import durable
from tests.durable.test_errors import run_with_outputs, run_large

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
said = {}
for name, run in (("state", run_large), ("outputs", run_with_outputs)):
    directory = f"{sys.argv[1]}/{name}"
    run(directory, 4)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    try:
        run(directory, 12)
    except durable.SaveError as error:
        said[name] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps(said))
"""


SAVED: dict[str, Any] = {"checkpoint_every": 4, "chunk_steps": 1}


def run_large(directory: Any, upper: int) -> Any:
    """A state of more than a megabyte, that does not compress."""
    init = jax.random.normal(jax.random.key(0), (200_000,))
    return durable.fori_loop(0, upper, lambda _, x: jnp.sin(x) * 1.5, init, directory=directory, **SAVED)


def run_with_outputs(directory: Any, length: int) -> Any:
    """A small state, and outputs of 16 KiB a row."""
    f = lambda c, _: (c + 1.0, jnp.arange(2048.0) + c)
    return durable.scan(f, 0.0, length=length, directory=directory, **SAVED)


@pytest.mark.slow
def test_writing_that_fails_stops_the_run_and_leaves_its_last_save(tmp_path: Any) -> None:
    done = python(FULL, tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert "durable.fori_loop: saving to " in said["state"]
    assert "The last good save is that of step 4. Make room" in said["state"]
    assert "writing outputs of a durable scan failed" in said["outputs"]
    assert max(saves(tmp_path / "state")) == 4
    assert max(saves(tmp_path / "outputs")) == 4
    same_bits(run_large(tmp_path / "state", 12), run_large(tmp_path / "new", 12))
    carry, rows = run_with_outputs(tmp_path / "outputs", 12)
    assert float(carry) == 12.0
    np.testing.assert_array_equal(rows[:, 0], np.arange(12.0))
