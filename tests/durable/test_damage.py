"""Damaged saves: the one before is taken, with a warning, and nothing wrong is ever taken for right."""

import gc
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
from loopax._src.durable.pace import SavePace
from loopax._src.durable.saves import Saves, checksums
from tests.durable.cases import SELDOM, Steps, read_rows, same_bits, saves, stopped

# Orbax leaves reads of a damaged save behind, which report to an event loop that it has closed.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

INIT = {"x": jnp.asarray(np.arange(4.0) / 7), "n": jnp.int32(0), "key": jax.random.key(3), "flag": jnp.bool_(True)}


@pytest.fixture(autouse=True)
def _collect_what_is_left() -> Any:
    """Here, not in the next test."""
    yield
    gc.collect()


def run(directory: Path, steps: Steps | None = None, **options: Any) -> Any:
    steps = steps or Steps()

    def f(c: Any, _: Any) -> Any:
        steps.at(c["n"])
        x = jnp.sin(c["x"]) * 1.5 + jax.random.normal(c["key"], (4,))
        return {"x": x, "n": c["n"] + 1, "key": jax.random.split(c["key"])[0], "flag": ~c["flag"]}, x[1:]

    options = {"checkpoint_every": 4, "chunk_steps": 2, **options}
    carry, ys = durable.scan(f, INIT, length=16, directory=directory, **options)
    jax.effects_barrier()
    return carry, read_rows(ys)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: Any) -> tuple[Path, Any]:
    """A run that has stopped with several saves, and what it should end with."""
    path = tmp_path_factory.mktemp("stored")
    expected = run(path / "whole", **SELDOM)
    stopped(lambda: run(path / "run", Steps(13), keep=3))
    assert len(saves(path / "run")) == 3
    return path / "run", expected


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00garbage" * 9)


DAMAGE: list[Callable[[Path], None]] = [flip, truncate, Path.unlink, garbage]


def copied(source: Path, to: Path) -> Path:
    """A copy of a stored run, to be damaged."""
    return Path(shutil.copytree(source, to / "run"))


def newest_state(directory: Path) -> Any:
    """As a run reads it."""
    like = [jax.random.key_data(x) if x is INIT["key"] else x for x in jax.tree.leaves(INIT)]
    store = Saves("a test", directory, 3, SavePace(1, True))
    state = store.newest(like)
    store.close()
    return state


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_no_damage_to_a_file_gives_a_wrong_state(damage: Any, stored: Any, tmp_path: Any) -> None:
    """Each file of the newest save, one at a time: the state is right, or it is that of the save before."""
    source, _ = stored
    *_, before, newest = saves(source)
    good = newest_state(source)
    assert good.steps == newest
    found = {}
    for i, path in enumerate(files(source / "saves" / str(newest))):
        name, directory = path.relative_to(source), tmp_path / str(i)
        if not path.stat().st_size:
            continue
        shutil.copytree(source, directory)
        damage(directory / name)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", durable.DamagedSaveWarning)
            state = newest_state(directory)
        found[name] = state.steps
        assert state.steps in (before, newest)
        assert [w.category for w in warned] == [durable.DamagedSaveWarning] * (state.steps == before)
        assert saves(directory)[-1] == state.steps
        if state.steps == newest:
            same_bits([state.goes_on, state.arrays], [good.goes_on, good.arrays])
    for part in ("state", "facts"):
        assert any(steps == before for name, steps in found.items() if part in name.parts)


def test_the_warning_says_what_was_wrong_and_where_the_run_goes_on(stored: Any, tmp_path: Any) -> None:
    source, expected = stored
    directory = copied(source, tmp_path)
    first, *damaged = saves(source)
    for step in damaged:
        for path in files(directory / "saves" / str(step) / "state"):
            truncate(path)
    with pytest.warns(durable.DamagedSaveWarning) as warned:
        result = run(directory, **SELDOM)
    same_bits(result, expected)
    (text,) = [str(w.message) for w in warned]
    assert all(f"step {step}: " in text for step in damaged)
    assert text.endswith(f"The run goes on from step {first} instead.")


def test_an_unfinished_save_is_removed_and_one_under_another_step_is_not_taken(stored: Any, tmp_path: Any) -> None:
    source, expected = stored
    directory, newest = copied(source, tmp_path), saves(source)[-1]
    left = directory / "saves" / f"{newest + 2}.orbax-checkpoint-tmp"
    shutil.copytree(source / "saves" / str(newest), left)
    (directory / "saves" / str(newest)).rename(directory / "saves" / str(newest + 1))
    with pytest.warns(durable.DamagedSaveWarning, match=f"step {newest + 1}: "):
        same_bits(run(directory, **SELDOM), expected)
    assert not left.exists()


def test_checksums_tell_arrays_apart() -> None:
    """Other values, and values in other places, but not how an array is spread over devices."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    spread = jax.NamedSharding(mesh, jax.P("a", "b"))
    for dtype in ("int8", "bfloat16", "float64", "complex64", "bool"):
        array = np.random.RandomState(0).randint(2 if dtype == "bool" else 100, size=(4, 6)).astype(np.dtype(dtype))
        changed = array.copy()
        changed[2, 3] = not array[2, 3]
        others = [changed, array.T.reshape(4, 6), array[::-1], array[:, [0, 1, 3, 2, 4, 5]]]
        base, *found = checksums([jnp.asarray(x) for x in (array, *others)])
        assert len({base, *found}) == 5
        assert checksums([jax.device_put(array, spread)]) == [base]
