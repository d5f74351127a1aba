"""`durable.lanes_stream`: results of items in rows on disk, each once, also where a run stops in between."""

import signal
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox import EquinoxRuntimeError

import loopax as lx
from loopax import durable
from loopax._src.durable import outputs as disk
from loopax._src.durable import streams as result_rows
from loopax._src.durable.saves import Saves
from tests.queues.streams import collatz, expected

LANES = 4


def numbers(count: int) -> list[Any]:
    return [np.int32(i + 1) for i in range(count)]


def run(directory: Any, items: Any, f: Any = collatz, **options: Any) -> durable.StreamOutputs:
    return durable.lanes_stream(f, items, directory=directory, **{"num_lanes": LANES, **options})


def by_item(found: durable.StreamOutputs) -> dict[int, Any]:
    rows = jax.tree.map(np.asarray, found.results)
    items = np.asarray(found.items).tolist()
    assert len(set(items)) == len(items)
    return {item: jax.tree.map(lambda x, row=row: x[row], rows) for row, item in enumerate(items)}


ANSWERS = {i: expected(i + 1) for i in range(60)}


def as_ints(found: durable.StreamOutputs) -> dict[int, Any]:
    return {i: (int(result["steps"]), int(result["most"])) for i, result in by_item(found).items()}


class StopError(Exception):
    pass


def stopping_at(items: Any, index: int, error: BaseException) -> Any:
    """A source that fails once; what is finished before that is saved."""
    for i, item in enumerate(items):
        if i == index:
            raise error
        yield item


def test_rows_are_results_and_the_same_call_again_runs_nothing(tmp_path: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(tmp_path, numbers(60))
    assert as_ints(found) == ANSWERS
    assert not np.asarray(found.failed).any()
    again = run(tmp_path, [*numbers(1), *[object()] * 59])  # items that were begun are not looked at
    assert np.array_equal(again.items, found.items)
    assert as_ints(again) == ANSWERS
    assert all(len(rows) == 60 for rows in durable.outputs(tmp_path).values())


@pytest.mark.parametrize("stops", [[0], [1], [7, 8], [3, 30, 59], [60]])
def test_a_run_goes_on_after_each_stop(stops: list[int], tmp_path: Any) -> None:
    for stop in stops:
        with pytest.raises(StopError):
            run(tmp_path, stopping_at([*numbers(60), None], stop, StopError()), chunk_steps=3)
    assert as_ints(run(tmp_path, numbers(60), chunk_steps=5)) == ANSWERS


def test_there_may_be_more_items_than_before_but_not_fewer(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(result_rows, "_FIRST_ROOM", 1)  # rows grow
    run(tmp_path, numbers(20), chunk_steps=2)
    assert as_ints(run(tmp_path, numbers(60))) == ANSWERS
    with pytest.raises(ValueError, match="has begun 60 items, and only 20 are given"):
        run(tmp_path, numbers(20))


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupt_saves_also_while_an_item_is_waited_for(number: int, kind: Any, tmp_path: Any) -> None:
    before, never = signal.signal(signal.SIGINT, signal.default_int_handler), threading.Event()

    def items() -> Any:
        yield from numbers(40)
        signal.raise_signal(number)
        never.wait(20)

    try:
        with pytest.raises(kind) as caught:
            run(tmp_path, items(), prefetch=1, chunk_steps=1)
    finally:
        never.set()
        signal.signal(signal.SIGINT, before)
    assert "items, which are saved in" in str(caught.value)
    assert as_ints(run(tmp_path, numbers(60))) == ANSWERS


def limited(n: Any) -> Any:
    return lx.while_loop(lambda i: i < n, lambda i: i + 1, jnp.int32(0), max_steps=10)


def test_the_error_of_an_item_names_it_each_time_or_marks_it(tmp_path: Any) -> None:
    items = [np.int32(n) for n in (3, 4, 11, 5)]
    for _ in range(2):
        with pytest.raises(EquinoxRuntimeError, match=r"item 2 of durable.lanes_stream: .*max_steps=10"):
            run(tmp_path / "errors", items, limited)
    found = run(tmp_path / "marks", items, limited, throw=False)
    assert sorted(zip(np.asarray(found.items), np.asarray(found.failed), strict=True)) == [
        (0, False),
        (1, False),
        (2, True),
        (3, False),
    ]


def test_keys_and_several_leaves(tmp_path: Any) -> None:
    def walk(item: Any) -> Any:
        # Small integers: on some processors, XLA rounds other numbers of this dtype differently in a batch.
        draw = lambda key: jax.random.randint(key, (2,), 0, 8).astype(jnp.bfloat16)
        step = lambda _, s: (jax.random.fold_in(s[0], 1), s[1] + draw(s[0]))
        key, x = lx.fori_loop(0, item["n"], step, (item["key"], jnp.zeros(2, jnp.bfloat16)), max_steps=8)
        return {"key": key, "x": x}

    keys = jax.random.split(jax.random.key(0), 9)
    items = [{"n": np.int32(i % 5), "key": keys[i]} for i in range(9)]
    with pytest.raises(StopError):
        run(tmp_path, stopping_at(items, 6, StopError()), walk, chunk_steps=1)
    found = run(tmp_path, items, walk)
    order = np.argsort(found.items)
    for i, row in enumerate(order):
        expected = walk(items[i])
        assert found.results["x"][row].tobytes() == np.asarray(expected["x"]).tobytes()
        assert jnp.array_equal(jax.random.key_data(found.results["key"][row]), jax.random.key_data(expected["key"]))


@pytest.mark.parametrize("what", ["save", "rows"])
def test_what_is_damaged_is_computed_again_from_the_save_before(what: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk, "PIECE_BYTES", 16)
    monkeypatch.setattr(disk, "_FEW_ROWS", 1)
    for stop in (20, 50):
        with pytest.raises(StopError):
            run(tmp_path, stopping_at(numbers(60), stop, StopError()))
    *_, newest = sorted((tmp_path / "saves").iterdir(), key=lambda path: int(path.name))
    of_newest = tmp_path / "outputs" / "0002" / "c" / "10"  # rows of items that the newest save has alone
    for file in [of_newest] if what == "rows" else (newest / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\0" * file.stat().st_size)
    with pytest.warns(durable.DamagedSaveWarning, match="does not hold rows 40 to 43" if what == "rows" else ""):
        assert as_ints(run(tmp_path, numbers(60))) == ANSWERS


def test_another_program_or_other_lanes_are_refused(tmp_path: Any) -> None:
    run(tmp_path, numbers(5))
    with pytest.raises(ValueError, match="lanes: stored 4, now 5"):
        run(tmp_path, numbers(5), num_lanes=5)
    with pytest.raises(ValueError, match="is one of another program"):
        run(tmp_path, numbers(5), lambda n: jax.tree.map(lambda x: x + 1, collatz(n)))
    with pytest.raises(TypeError, match=r"durable.lanes_stream\(checkpoint_every=...\): got 10, expected"):
        run(tmp_path, numbers(5), checkpoint_every=10)
    with pytest.raises(ValueError, match="state of other types"):
        run(tmp_path, numbers(5), limited)
    with pytest.warns(durable.AnotherProgramWarning):
        run(tmp_path, numbers(9), lambda n: jax.tree.map(lambda x: x + 1, collatz(n)), resume="anyway")


def test_readers_see_which_rows_are_written(tmp_path: Any) -> None:
    seen = []

    def items() -> Any:
        yield from numbers(60)
        seen.append(durable.outputs(tmp_path)["['items']"][:])

    run(tmp_path, items(), prefetch=1, chunk_steps=1)
    assert len(seen[0]) > 60
    written = seen[0][seen[0] >= 0].tolist()
    assert len(set(written)) == len(written) < 60
    assert (seen[0][len(written) :] == -1).all()


def test_rows_are_on_disk_before_a_save_begins(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start, found = Saves.start, []

    def checked(saves: Saves, state: Any) -> None:
        rows, _ = np.asarray(state.arrays[0]).view(np.int64).tolist()
        written = durable.outputs(tmp_path)["['items']"][:]
        found.append((int((written >= 0).sum()), rows))
        start(saves, state)

    monkeypatch.setattr(Saves, "start", checked)
    run(tmp_path, numbers(60), chunk_steps=20, checkpoint_every=1e-3)
    assert len(found) > 2
    assert all(written == rows for written, rows in found)
