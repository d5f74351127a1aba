"""What a durable loop refuses, and what it says then."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax import durable
from tests.durable.cases import same_bits, saves
from tests.hosts.processes import Processes

X = jnp.arange(3.0)
double = lambda _, x: x * 2.0


def run(directory: Any, **options: Any) -> Any:
    return durable.fori_loop(0, 4, double, X, directory=directory, **options)


WRONG: list[tuple[Any, Any, str]] = [
    ({"checkpoint_every": 0}, ValueError, r"checkpoint_every=...\): got 0, expected a positive number"),
    ({"checkpoint_every": float("inf")}, ValueError, "got inf, expected a positive number of seconds"),
    ({"checkpoint_every": True}, TypeError, "got True, expected an int"),
    ({"checkpoint_every": "1m"}, TypeError, "got '1m', expected an int .steps., a float .seconds."),
    ({"keep": 0}, ValueError, r"keep=...\): got 0, expected at least 1"),
    ({"resume": "alway"}, ValueError, r"resume=...\): got 'alway', expected 'auto' or 'anyway'"),
    ({"chunk_steps": 0}, ValueError, r"chunk_steps=...\): got 0, expected an int from 1 to"),
    ({"chunk_steps": 1.0}, TypeError, "expected an int, the steps of a compiled chunk"),
    ({"max_steps": -1}, ValueError, r"max_steps=...\): got -1, expected an int from 0 to 92233720368"),
    ({"kind": "auto"}, TypeError, "unexpected keyword argument 'kind'"),
]


def test_wrong_options(tmp_path: Any) -> None:
    for options, kind, message in WRONG:
        with pytest.raises(kind, match=message) as error:
            run(tmp_path / "run", **options)
        assert "fori_loop(" in str(error.value)
        assert not (tmp_path / "run").exists()


def test_limits_and_lengths_that_are_no_integers(tmp_path: Any) -> None:
    number: Any = 1.0
    with pytest.raises(TypeError, match=r"durable\.fori_loop\(upper=...\): got .*, expected"):
        durable.fori_loop(0, number, double, X, directory=tmp_path)
    with pytest.raises(TypeError, match=r"durable\.scan\(length=...\): got .*, expected an int"):
        durable.scan(lambda c, x: (c, x), 0, X, number, directory=tmp_path)


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
        (lambda _: durable.fori_loop(0, 3, double, leaked[0], directory=tmp_path), "fori_loop"),
        (jax.jit(lambda x: durable.lanes_stream(lambda x: run(tmp_path), [x], directory=tmp_path)), "lanes_stream"),
    ]
    for call, name in calls:
        with pytest.raises(TypeError, match=f"durable.{name} saves to disk .* Call it outside of them, or call `loop"):
            call(X)
    assert list(tmp_path.iterdir()) == []


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


def test_directories_that_cannot_be_written(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(NotADirectoryError, match="Give a directory in which this process may make files"):
        run(tmp_path / "file" / "under")
    with pytest.raises(TypeError, match=r"durable.fori_loop\(directory=...\): got .*, expected a path"):
        run(3)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(Path, "touch", refuse)  # tests may run as one who may do everything
    with pytest.raises(PermissionError, match=r"cannot be written to: Permission denied.*closed"):
        run(tmp_path / "closed")


def test_links_that_lead_nowhere(tmp_path: Any) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, link, target in [("link/run", "link", "disk"), ("loop", "loop", "loop")]:
        with pytest.raises(FileNotFoundError, match=r"Make that directory .*, or remove") as error:
            run(tmp_path / name)
        expected = f"durable.fori_loop(directory=...) leads through a link to {tmp_path / target}, which is not there"
        assert expected in str(error.value)
        assert str(error.value).endswith(repr(str(tmp_path / link)))
        for read in (durable.outputs, durable.steps_saved):
            with pytest.raises(FileNotFoundError, match="leads through a link to"):
                read(tmp_path / name)
    assert not (tmp_path / "disk").exists()
    (tmp_path / "disk").mkdir()
    run(tmp_path / "link")
    assert durable.steps_saved(tmp_path / "disk") == durable.steps_saved(tmp_path / "link") == 4


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
    with pytest.raises(
        ImportError, match=r"orbax.checkpoint, which cannot be imported. Install it: .*loopax\[durable\]"
    ):
        run(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match="tensorstore, which cannot be imported"):
        run(tmp_path)


SAVED: dict[str, Any] = {"checkpoint_every": 4, "chunk_steps": 1}


def run_large(directory: Any, upper: int) -> Any:
    """A state of more than a megabyte, that does not compress."""
    init = jax.random.normal(jax.random.key(0), (200_000,))
    return durable.fori_loop(0, upper, lambda _, x: jnp.sin(x) * 1.5, init, directory=directory, **SAVED)


def run_with_outputs(directory: Any, length: int) -> Any:
    """A small state, and outputs of 16 KiB a row."""
    f = lambda c, _: (c + 1.0, jnp.arange(2048.0) + c)
    return durable.scan(f, 0.0, length=length, directory=directory, **SAVED)


def on_a_full_disk(directory: str) -> dict[str, str]:
    """What is said in a process in which no file may be larger than 60 kB, after the first save."""
    import resource  # Windows has none

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said: dict[str, str] = {}
    for name, run in (("state", run_large), ("outputs", run_with_outputs)):
        run(f"{directory}/{name}", 4)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        try:
            run(f"{directory}/{name}", 12)
        except durable.SaveError as error:
            said[name] = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return said


@pytest.mark.slow
def test_writing_that_fails_stops_the_run_and_leaves_its_last_save(tmp_path: Any) -> None:
    with Processes("tests.durable.test_errors:on_a_full_disk", 1, 1, [tmp_path]) as process:
        (said,) = process.found()
    assert "durable.fori_loop: saving to " in said["state"]
    assert "The last good save is that of step 4. Make room" in said["state"]
    assert "writing outputs of a durable run failed" in said["outputs"]
    assert max(saves(tmp_path / "state")) == 4
    assert max(saves(tmp_path / "outputs")) == 4
    same_bits(run_large(tmp_path / "state", 12), run_large(tmp_path / "new", 12))
    carry, rows = run_with_outputs(tmp_path / "outputs", 12)
    assert float(carry) == 12.0
    np.testing.assert_array_equal(rows[:, 0], np.arange(12.0))
