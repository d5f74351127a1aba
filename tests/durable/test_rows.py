"""Outputs on disk: what is indexed is read, also by another process while the run goes on."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from loopax import durable
from loopax._src.durable import outputs as disk
from tests.durable.cases import Steps, same_bits, saves, stopped


@pytest.fixture(scope="module")
def stored(tmp_path_factory: Any) -> Any:
    """Outputs of several types, and the same in memory."""
    keys = jax.random.split(jax.random.key(0), 13)
    xs = {
        "x": jnp.arange(13.0 * 6).reshape(13, 2, 3) / 7,
        "half": jnp.arange(13.0).astype(jnp.bfloat16) / 3,
        "key": keys,
        "none": jnp.zeros((13, 0)),
    }
    path = tmp_path_factory.mktemp("rows")
    _, ys = durable.scan(lambda c, x: (c, x), 0, xs, directory=path, chunk_steps=5)
    return path, ys, xs


INDICES: list[Any] = [
    0, -13, np.int64(3), slice(None), slice(-3, None), slice(1, 12, 4), slice(5, 5), ..., (3, ..., 2), (slice(1, 4), 0),
    (slice(None), 1, slice(0, 2)), np.array([3, 1, 3]), [0, 2], (np.array([1, 4]), 1), (slice(2, 5), -1, -1),
    np.arange(13) % 3 == 0, slice(0, 20), slice(-20, 3), slice(9, 2),
]  # fmt: skip


def test_indexing_is_that_of_numpy(stored: Any) -> None:
    """Slices are cut; other indices that are out of bounds are errors."""
    _, ys, xs = stored
    for index in INDICES:
        found, expected = ys["x"][index], np.asarray(xs["x"])[index]
        assert (type(found), found.shape, found.dtype) == (np.ndarray, expected.shape, expected.dtype)
        np.testing.assert_array_equal(found, expected)
    wrong: list[Any] = [13, -14, (0, 2), (0, 0, 0, 0), (..., ...), 1.5, "x", np.array([3, 13]), slice(None, None, -1)]
    for index in wrong:
        with pytest.raises(IndexError):
            ys["x"][index]


def test_whole_arrays_of_any_dtype(stored: Any) -> None:
    """Also of those that NumPy does not have, and of keys."""
    _, ys, xs = stored
    x, half, key = ys["x"], ys["half"], ys["key"]
    assert (len(x), x.shape, x.ndim, x.nbytes, x.dtype) == (13, (13, 2, 3), 3, 13 * 48, np.float64)
    assert np.asarray(x, np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="cannot be an array without a copy"):
        np.asarray(x, copy=False)
    assert x == ys["x"]
    assert len({x, half}) == 2
    assert (half.dtype, half[3].dtype, np.asarray(half).dtype) == (jnp.bfloat16,) * 3
    for name in ("x", "half"):
        same_bits(jnp.asarray(ys[name][:]), xs[name])
    for index in (0, -2, slice(3, 5), slice(None), np.array([2, 1])):
        same_bits(key[index], xs["key"][index])
    assert (key.shape, key.ndim, len(key), key.dtype) == (xs["key"].shape, 1, 13, xs["key"].dtype)
    assert [jax.random.key_data(row).tolist() for row in key] == jax.random.key_data(xs["key"]).tolist()
    assert (ys["none"].shape, ys["none"][2:4].shape) == ((13, 0), (2, 0))


def test_outputs_of_a_directory(stored: Any, tmp_path: Any) -> None:
    path, ys, xs = stored
    found = durable.outputs(str(path))
    assert found.keys() == {"['half']", "['key']", "['none']", "['x']"}
    for name, y in ys.items():
        other = found[f"['{name}']"]
        assert (other.shape, other.dtype, other.path) == (y.shape, y.dtype, y.path)
        same_bits(jnp.asarray(other[2:5]), xs[name][2:5])
    assert durable.steps_saved(path) == 13
    for what in (tmp_path, tmp_path / "no"):
        with pytest.raises(FileNotFoundError, match=r"holds no outputs of a durable run"):
            durable.outputs(what)
        assert durable.steps_saved(what) == 0


def test_a_reader_sees_all_arrays_of_a_run_or_none(tmp_path: Any, monkeypatch: Any) -> None:
    """A run that is killed while it makes them, or read meanwhile."""
    make, made = tensorstore.open, []

    def make_one(*args: Any, **options: Any) -> Any:
        if made:
            raise KeyboardInterrupt
        made.append(make(*args, **options))
        return made[0]

    def run() -> Any:
        return durable.scan(lambda c, x: (c, (x, 2 * x)), 0, jnp.arange(3), directory=tmp_path)

    monkeypatch.setattr(tensorstore, "open", make_one)
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError, match="holds no outputs"):
        durable.outputs(tmp_path)
    run()
    assert [rows[:].tolist() for rows in durable.outputs(tmp_path).values()] == [[0, 1, 2], [0, 2, 4]]


def test_any_zarr_library_reads_them(stored: Any) -> None:
    _, ys, xs = stored
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(ys["x"].path)}}
    np.testing.assert_array_equal(tensorstore.open(spec).result().read().result(), xs["x"])
    metadata = json.loads((ys["x"].path / "zarr.json").read_text())
    assert (metadata["zarr_format"], metadata["shape"], metadata["data_type"]) == (3, [13, 2, 3], "float64")


def test_another_reader_reads_while_the_run_goes_on(tmp_path: Any) -> None:
    said: list[Any] = []

    def look(i: Any) -> None:
        if int(i) == 13:
            said.append((durable.steps_saved(tmp_path), durable.outputs(tmp_path)[""][:].tolist()))

    def f(c: Any, _: Any) -> Any:
        jax.debug.callback(look, c)
        return c + 1, c * 10

    _, ys = durable.scan(f, 0, length=24, directory=tmp_path, chunk_steps=2, checkpoint_every=4)
    jax.effects_barrier()
    ((saved, rows),) = said
    assert (saved in range(8, 14), len(rows)) == (True, 24)
    assert rows[:saved] == [10 * i for i in range(saved)]
    assert rows[saved + 6 :] == [0] * (24 - saved - 6)
    assert ys[:].tolist() == [10 * i for i in range(24)]


@pytest.mark.parametrize("reverse", [False, True])
def test_rows_that_wait_are_written_in_order(reverse: bool, tmp_path: Any, monkeypatch: Any) -> None:
    """In pieces that begin and end in the middle of stored ones, before the run stops and after."""
    monkeypatch.setattr(disk, "WAITING_BYTES", 100)
    monkeypatch.setattr(disk, "PIECE_BYTES", 64)
    monkeypatch.setattr(disk, "_FEW_ROWS", 1)
    steps = Steps(14)

    def f(c: Any, x: Any) -> Any:
        steps.at(c)
        return c + 1, (x * 10.0, jnp.stack([x, c.astype(float)]))

    xs = jnp.arange(31.0)
    run = lambda: durable.scan(f, 0, xs, reverse=reverse, directory=tmp_path, chunk_steps=3, checkpoint_every=5)
    stopped(run)
    assert len(list((tmp_path / "outputs" / "0000" / "c").iterdir())) >= 2
    assert 0 < max(saves(tmp_path)) < 14
    steps.stop_at = None
    _, (y, pairs) = run()
    count = np.arange(31.0)[::-1] if reverse else np.arange(31.0)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(xs) * 10)
    np.testing.assert_array_equal(np.asarray(pairs), np.stack([np.asarray(xs), count], 1))


def test_chunks_are_cut_to_what_fits_into_memory(tmp_path: Any, monkeypatch: Any) -> None:
    """Whatever number of steps is asked for; whole iterations stay whole."""
    from loopax._src.durable import chunk

    monkeypatch.setattr(chunk, "CHUNK_BYTES", 100)
    f = lambda c, _: (c + 1.0, jnp.stack([c, c, c]))
    for unroll in (1, 3, 7):
        _, ys = durable.scan(f, 0.0, length=23, directory=tmp_path / str(unroll), chunk_steps=1000, unroll=unroll)
        np.testing.assert_array_equal(ys[:, 1], np.arange(23.0))
