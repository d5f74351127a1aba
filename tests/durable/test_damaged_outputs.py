"""Damaged outputs: found when they are read and when the run goes on; lost rows are computed again, or named."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax import durable
from loopax._src.durable import outputs as disk
from tests.durable.cases import SELDOM, Steps, read_rows, same_bits, saves, stopped
from tests.durable.test_damage import DAMAGE, files, flip, truncate

LENGTH = 48


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: Any) -> None:
    """Of four rows of `y`, and of sixteen of `n`."""
    monkeypatch.setattr(disk, "PIECE_BYTES", 64)
    monkeypatch.setattr(disk, "_FEW_ROWS", 1)


def run(directory: Path, steps: Steps | None = None, **options: Any) -> Any:
    steps = steps or Steps()

    def f(c: Any, _: Any) -> Any:
        steps.at(c["n"])
        n = c["n"] + 1
        return {"x": jnp.sin(c["x"]) * 1.5, "n": n}, {"y": c["x"] + 1.0, "n": n.astype(jnp.int32)}

    init = {"x": jnp.arange(2.0) + 0.5, "n": jnp.int64(0)}
    options = {"checkpoint_every": 8, "chunk_steps": 2, "length": LENGTH, **options}
    carry, ys = durable.scan(f, init, directory=directory, **options)
    jax.effects_barrier()
    return carry, read_rows(ys)


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["forward", "reverse"])
def stored(request: Any, tmp_path_factory: Any) -> Any:
    """A whole run, and one that has stopped; what the whole one gives; whether rows are written from the last on."""
    path, reverse = tmp_path_factory.mktemp("runs"), request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "PIECE_BYTES", 64)
        patch.setattr(disk, "_FEW_ROWS", 1)
        expected = run(path / "whole", reverse=reverse, keep=5)
        stopped(lambda: run(path / "stopped", Steps(27), reverse=reverse, keep=5))
    return path, expected, reverse


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_no_damage_to_outputs_is_read(damage: Callable[[Path], None], stored: Any, tmp_path: Any) -> None:
    """Each file of a finished run, one at a time: what is read is right, or an error names the file."""
    path, (_, expected), _ = stored
    source, directory = path / "whole", tmp_path / "run"
    names = [file.relative_to(source) for file in files(source / "outputs")]
    found: dict[Path, str] = {}
    shutil.copytree(source / "outputs", directory / "outputs")
    for name in names:
        damage(directory / name)
        try:
            rows = durable.outputs(directory)
            same_bits({key: jnp.asarray(rows[f"['{key}']"][:]) for key in ("n", "y")}, expected)
        except (RuntimeError, FileNotFoundError) as error:
            found[name] = str(error).replace(str(directory / name), "FILE")
        shutil.copy(source / name, directory / name)
    pieces = {name for name in names if "c" in name.parts}
    assert len(pieces) > 10
    assert found.keys() == pieces | {Path("outputs/.loopax.json")}  # Zarr's own description is for other libraries
    gone = {name: text for name, text in found.items() if "are damaged: FILE" not in text}
    assert all(name.name == ".loopax.json" and "holds no outputs" in text for name, text in gone.items())
    assert bool(gone) == (damage is Path.unlink)


def test_the_error_names_file_and_rows_and_says_what_to_do(stored: Any, tmp_path: Any) -> None:
    path, (_, expected), _ = stored
    shutil.copytree(path / "whole", tmp_path / "run")
    where = tmp_path / "run" / "outputs" / "0001" / "c" / "3" / "0"
    flip(where)
    y = durable.outputs(tmp_path / "run")["['y']"]
    for index in (13, -35, slice(10, 20), (slice(None), 0), np.array([2, 14]), np.arange(LENGTH) == 12, ..., (14, 1)):
        with pytest.raises(RuntimeError) as error:
            y[index]
        assert f"{where} does not hold rows 12 to 15 as they were written" in str(error.value)
        assert "Restore the file from a backup, call the same function again" in str(error.value)
    with pytest.raises(RuntimeError, match="rows 12 to 15"):
        list(y)
    for index in (slice(0, 12), slice(16, None), 11, 16, np.array([2, 17]), slice(16, 3)):
        np.testing.assert_array_equal(y[index], np.asarray(expected["y"])[index])


LOST: list[Any] = [("whole", Path.unlink), ("stopped", flip), ("stopped", truncate)]


@pytest.mark.parametrize(("name", "damage"), LOST)
def test_lost_rows_are_computed_again_from_the_last_save_that_precedes_them(
    name: str, damage: Callable[[Path], None], stored: Any, tmp_path: Any
) -> None:
    path, expected, reverse = stored
    shutil.copytree(path / name, tmp_path / "run")
    *_, before, newest = saves(path / name)
    lost = newest - 5  # in a piece whose rows all belong to that save
    piece = (LENGTH - 1 - lost if reverse else lost) // 4
    damage(tmp_path / "run" / "outputs" / "0001" / "c" / str(piece) / "0")
    steps = Steps()
    with pytest.warns(durable.DamagedSaveWarning) as warned:
        same_bits(run(tmp_path / "run", steps, reverse=reverse, keep=5, **SELDOM), expected)
    text = str(warned[0].message)
    assert f"0001/c/{piece}/0 does not hold rows" in text
    start = int(text.rpartition("The run goes on from step ")[2].split()[0])
    assert start <= before
    assert sorted(steps.taken) == list(range(start, LENGTH))
    same_bits(run(tmp_path / "run", steps, reverse=reverse), expected)  # all is well again


def test_rows_that_no_save_precedes_are_an_error(stored: Any, tmp_path: Any) -> None:
    path, _, reverse = stored
    for name in ("whole", "stopped"):
        directory = tmp_path / name
        shutil.copytree(path / name, directory)
        piece = directory / "outputs" / "0001" / "c" / ("11" if reverse else "0") / "0"  # the first that is written
        piece.unlink()
        with pytest.raises(RuntimeError, match=r"no save in .* is whole") as error:
            run(directory, reverse=reverse, keep=5)
        rows = "44 to 47" if reverse else "0 to 3"
        count = len(saves(path / name))
        assert str(error.value).count(f"{piece} does not hold rows {rows} as they were written.\n") == count
        assert "Restore what is damaged from a backup, or delete the directory" in str(error.value)
        assert saves(directory) == saves(path / name)  # for a person to look at


def test_what_no_save_has_is_written_again_whatever_it_is(stored: Any, tmp_path: Any) -> None:
    """Rows after the newest save do not count: they are computed again."""
    path, expected, reverse = stored
    shutil.copytree(path / "stopped", tmp_path / "run")
    last = max(saves(tmp_path / "run"))
    beyond = [LENGTH - 1 - step if reverse else step for step in range(last + 4, LENGTH)]
    for piece in {row // 4 for row in beyond}:
        file = tmp_path / "run" / "outputs" / "0001" / "c" / str(piece) / "0"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"garbage")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same_bits(run(tmp_path / "run", reverse=reverse, keep=5, **SELDOM), expected)


@pytest.mark.parametrize("damage", [flip, Path.unlink], ids=lambda f: f.__name__)
def test_damaged_descriptions_stop_a_run(damage: Callable[[Path], None], stored: Any, tmp_path: Any) -> None:
    path, _, reverse = stored
    for i, name in enumerate((".loopax.json", "0001/zarr.json")):
        directory = tmp_path / str(i)
        shutil.copytree(path / "stopped", directory)
        file = directory / "outputs" / name
        damage(file)
        with pytest.raises(RuntimeError) as error:
            run(directory, reverse=reverse, keep=5)
        assert "durable" in str(error.value)
        assert str(file) in str(error.value)
        assert "or delete the directory of the run to start anew" in str(error.value)
        assert saves(directory) == saves(path / "stopped")


def test_rows_of_a_save_are_known_however_often_the_run_has_gone_on_since(stored: Any, tmp_path: Any) -> None:
    """What is known of rows is kept for each save: those after it may turn out to be damaged."""
    path, expected, reverse = stored
    shutil.copytree(path / "stopped", tmp_path / "run")
    *_, before, last = saves(path / "stopped")
    stopped(lambda: run(tmp_path / "run", Steps(33), reverse=reverse, keep=9))
    for step in saves(tmp_path / "run"):
        if step >= last:
            shutil.rmtree(tmp_path / "run" / "saves" / str(step) / "state")
    with pytest.warns(durable.DamagedSaveWarning, match=f"from step {before} instead"):
        same_bits(run(tmp_path / "run", reverse=reverse, keep=9, **SELDOM), expected)
