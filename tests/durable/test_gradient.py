"""Gradients of runs whose states are kept on disk."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopax import durable
from loopax._src.durable import gradient, gradient_plan
from loopax._src.durable.gradient import value_and_grad
from loopax._src.durable.gradient_plan import fewest
from tests.durable.cases import StoppedError, read_rows, same_bits
from tests.support.reference import assert_close

STEPS, CHUNK = 43, 5
CHUNKS = 9
PARAMS = {"w": np.random.RandomState(0).randn(3, 3) * 0.5, "s": np.float64(0.7)}
XS = np.random.RandomState(1).randn(STEPS, 3)
STATE_BYTES = 3 * 8 + 4 + 8  # h, k and the sum


def body(params, carry, x):
    h = jnp.tanh(params["w"] @ carry["h"] + x)
    return {"h": h, "k": carry["k"] + 1}, (h**2).sum() * params["s"]


def without_rows(params, carry, _):
    return body(params, carry, jnp.sin(carry["k"].astype(float) * jnp.arange(3.0)))


def loss(params, carry, total):
    return total + (carry["h"] ** 3).sum() * params["s"] + 0.1 * carry["k"].astype(total.dtype)


def start():
    return {"h": jnp.full(3, 0.1), "k": jnp.int32(0)}


def params():
    return jax.tree.map(jnp.asarray, PARAMS)


def in_memory(f, xs, steps):
    def of_all(params, h, xs):
        carry = start() | {"h": h}
        carry, ys = lax.scan(lambda carry, x: f(params, carry, x), carry, xs, steps)
        return loss(params, carry, ys.sum())

    return jax.jit(jax.value_and_grad(of_all, (0, 1) if xs is None else (0, 1, 2)))(params(), start()["h"], xs)


def on_disk(path, f=body, xs: Any = XS, *, with_loss=loss, given=None, **options):
    options = {"chunk_steps": CHUNK, "checkpoint_every": 1000.0} | options
    run = value_and_grad(with_loss, f, directory=path, **options)
    value, (of_params, of_init, of_xs) = run(params() if given is None else given, start(), xs)
    assert of_init["k"] is None
    return value, (of_params, of_init["h"], *([] if xs is None else [read_rows(of_xs)]))


ROOMS = [(CHUNKS - 1, 0), (3, 0), (1, 2), (0, 3)]  # states on disk and in memory


@pytest.fixture
def room(monkeypatch):
    """Sets how many states are kept."""
    planned = gradient.plan

    def of(disk, memory):
        monkeypatch.setattr(gradient, "plan", lambda *args: planned(*args)._replace(disk=disk, memory=memory))

    return of


@pytest.mark.parametrize(("disk", "memory"), [*ROOMS, (0, 0)])
def test_gradients_are_those_of_the_loop_in_memory(tmp_path, room, disk, memory):
    room(disk, memory)
    assert_close(on_disk(tmp_path), in_memory(body, XS, STEPS), 1e-12)


@pytest.mark.parametrize(("steps", "chunk"), [(1, 5), (5, 5), (6, 5), (4, 1), (3, 100)])
def test_lengths_of_runs_and_chunks(tmp_path, steps, chunk):
    assert_close(on_disk(tmp_path, xs=XS[:steps], chunk_steps=chunk), in_memory(body, XS[:steps], steps), 1e-12)


def test_without_rows(tmp_path):
    found = on_disk(tmp_path, without_rows, None, length=STEPS)
    assert_close(found, in_memory(without_rows, None, STEPS), 1e-12)


def test_a_chunk_is_measured_once(tmp_path):
    found = on_disk(tmp_path, chunk_steps=None)
    assert_close(found, in_memory(body, XS, STEPS), 1e-12)
    same_bits(on_disk(tmp_path, chunk_steps=None), found)


class Counted:
    """Counts what is computed, and stops a run before one of these."""

    def __init__(self, monkeypatch, stop_at=None, looks=lambda: None):
        self.names, self.stop_at, self.looks = [], stop_at, looks
        programs = gradient_plan.Programs

        def counting(*args):
            found: Any = programs(*args)
            found.forward, found.record = self._of("forward", found.forward), self._of("record", found.record)
            return found

        monkeypatch.setattr(gradient_plan, "Programs", counting)

    def _of(self, name, function):
        def counting(*args):
            self.looks()
            if len(self.names) == self.stop_at:
                raise StoppedError
            self.names.append(name)
            return function(*args)

        return counting


@pytest.mark.parametrize(("disk", "memory"), [*ROOMS, (0, 1)])
def test_evaluations_are_those_of_the_schedule(tmp_path, monkeypatch, room, disk, memory):
    """And no more states are on disk than have room."""
    room(disk, memory)
    most = [0]

    def look():
        found = [path for path in (tmp_path / "states" / "saves").iterdir() if path.name.isdigit()]
        most[0] = max(most[0], len(found))

    counted = Counted(monkeypatch, looks=look)
    on_disk(tmp_path)
    assert counted.names.count("record") == CHUNKS
    assert len(counted.names) == fewest(CHUNKS, 1 + disk + memory)
    assert most[0] <= disk


@pytest.mark.parametrize(("disk", "memory"), [(CHUNKS - 1, 0), (2, 1)])
@pytest.mark.parametrize("every", [1, 1000])
def test_runs_that_stop_anywhere_end_with_the_same_bits(tmp_path, monkeypatch, room, disk, memory, every):
    room(disk, memory)
    options = {"checkpoint_every": every}
    counted = Counted(monkeypatch)
    expected = on_disk(tmp_path / "undisturbed", **options)
    for stop_at in range(0, len(counted.names), 3):
        counted.names.clear()
        counted.stop_at = stop_at
        with pytest.raises(StoppedError):
            on_disk(tmp_path / f"{stop_at}", **options)
        counted.stop_at = stop_at + 7  # behind what is done again: a second time
        counted.names.clear()
        try:
            found = on_disk(tmp_path / f"{stop_at}", **options)
        except StoppedError:
            counted.stop_at = None
            found = on_disk(tmp_path / f"{stop_at}", **options)
        same_bits(found, expected)


def test_a_run_that_has_ended_computes_nothing(tmp_path, monkeypatch):
    expected, counted = on_disk(tmp_path), Counted(monkeypatch)
    same_bits(on_disk(tmp_path), expected)
    assert not counted.names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"f": lambda params, carry, x: body(params, carry, 2.0 * x)}, "step computes something else"),
        ({"with_loss": lambda params, carry, total: 2.0 * loss(params, carry, total)}, "step computes something else"),
        ({"given": PARAMS | {"s": jnp.float64(0.8)}}, "other values"),
        ({"xs": XS + 1.0}, "other values"),
        ({"xs": XS[:-1]}, "steps: stored 43, now 42"),
        ({"chunk_steps": 4}, "chunk_steps"),
    ],
)
def test_another_program_is_refused(tmp_path, change, message):
    on_disk(tmp_path)
    with pytest.raises((ValueError, RuntimeError), match=message):
        on_disk(tmp_path, **change)


# Damage.


def stopped_on_the_way_back(path, monkeypatch, room):
    """A run with all states on disk, that has saved the gradient of some chunks; what it counts from then on."""
    room(CHUNKS - 1, 0)
    counted = Counted(monkeypatch, stop_at=CHUNKS + 2)
    with pytest.raises(StoppedError):
        on_disk(path, checkpoint_every=1)
    counted.stop_at = None
    counted.names.clear()
    return counted


def flip(path):
    """Change a bit of the largest file in a directory."""
    file = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    return file


def test_a_state_that_is_damaged_is_computed_again(tmp_path, monkeypatch, room):
    expected = on_disk(tmp_path / "undisturbed")
    counted = stopped_on_the_way_back(tmp_path / "run", monkeypatch, room)
    states = tmp_path / "run" / "states" / "saves"
    flip(states / "3")
    flip(states / "4")
    with pytest.warns(durable.DamagedSaveWarning, match="the state before chunk [34] in .*states.saves is damaged"):
        same_bits(on_disk(tmp_path / "run", checkpoint_every=1), expected)
    assert counted.names.count("forward") >= 2


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("plan.json", "plan.json is damaged"),
        ("plan.json with other chunks", "plan.json is damaged .its checksum differs"),
        ("plan.json gone", "there are saves in .*, but plan.json, which describes them, is gone"),
        ("program.json gone", "there are saves in .*, but program.json, which describes them, is gone"),
        ("program.json", "program.json is no description of a run"),
        ("outputs/.loopax.json", ".loopax.json cannot be read"),
        ("outputs/0000", "outputs/0000/c/0/0 does not hold rows"),
        ("back/saves", "no save in .*back/saves is whole"),
    ],
)
def test_other_damage_names_the_file(tmp_path, monkeypatch, room, what, message):
    """And leaves all as it is."""
    stopped_on_the_way_back(tmp_path, monkeypatch, room)
    name, _, how = what.partition(" ")
    place = tmp_path / name
    if how == "gone":
        place.unlink()
    elif how:
        place.write_text(place.read_text().replace('"chunk_steps": 5', '"chunk_steps": 4'))
    elif place.is_dir():
        for save in place.iterdir() if what == "back/saves" else [place]:
            flip(save)
    else:
        place.write_text("{")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((RuntimeError, ValueError), match=message):
        on_disk(tmp_path, checkpoint_every=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_while_loop_whose_last_state_is_damaged_counts_its_steps_anew(tmp_path, monkeypatch, room):
    """Only that state says how many steps there are; the save before it says fewer."""
    room(CHUNKS, 0)
    step = lambda params, carry: body(params, carry, jnp.sin(carry["k"].astype(float) * jnp.arange(3.0)))[0]
    condition = lambda _, carry: carry["k"] < STEPS
    options = {"loop": "while_loop", "cond_fun": condition, "chunk_steps": CHUNK, "checkpoint_every": 15}
    end = lambda params, carry: loss(params, carry, carry["h"].sum())
    run = lambda path: value_and_grad(end, step, directory=path, **options)(params(), start())
    counted = Counted(monkeypatch)
    expected = run(tmp_path / "undisturbed")
    counted.names.clear()
    counted.stop_at = CHUNKS + 6
    with pytest.raises(StoppedError):
        run(tmp_path / "run")
    counted.stop_at = None
    saves = tmp_path / "run" / "ahead" / "saves"
    flip(max(saves.iterdir(), key=lambda path: int(path.name)))
    with pytest.warns(durable.DamagedSaveWarning):
        same_bits(run(tmp_path / "run"), expected)
