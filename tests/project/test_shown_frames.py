"""Errors show lines of the user's, and no frame of loopax."""

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax import durable, schedule, stochtrace

HERE = str(Path(__file__))
LOOPAX = str(Path(lx.__file__).parent)
X = jnp.ones(3)
NEGATIVE: Any = -1
NUMBER: Any = 3
NAME: Any = "banana"
MESH = jax.make_mesh((1,), ("d",))


def wrong(*args: Any, **_: Any) -> Any:
    return args[-1].no_such_attribute


def stream(f: Any, **options: Any) -> Any:
    return next(lx.lanes_stream(f, [1.0, 2.0], num_lanes=2, **options))


def looping(x: Any) -> Any:
    return lx.fori_loop(0, 2, wrong, x)


def suspend_twice() -> Any:
    with lx.lanes_stream(looping, [], num_lanes=2) as results:
        results.suspend()
        return results.suspend()


# What users call: (a mistake in the call, a mistake in a function that it is given; None: it is given none)
Mistakes = tuple[Callable[[Any], Any], Callable[[Any], Any] | None]
MISTAKES: dict[str, Mistakes] = {
    "while_loop": (
        lambda _: lx.while_loop(wrong, wrong, X, max_steps=-1),
        lambda _: lx.while_loop(lambda c: c.sum() < 9, wrong, X),
    ),
    "fori_loop": (lambda _: lx.fori_loop(0, 2, wrong, X, throw=NUMBER), lambda _: lx.fori_loop(0, 2, wrong, X)),
    "scan": (lambda _: lx.scan(wrong, X, length=-1), lambda _: lx.scan(wrong, X, X)),
    "rollout": (lambda _: lx.rollout(wrong, X, -1), lambda _: lx.rollout(wrong, X, 3)),
    "cond": (lambda _: lx.cond(X, wrong, wrong, X), lambda _: lx.cond(True, wrong, wrong, X)),
    "switch": (lambda _: lx.switch(0, []), lambda _: lx.switch(1, [wrong, wrong], X)),
    "lanes_map": (lambda _: lx.lanes_map(wrong, X, num_lanes=0), lambda _: lx.lanes_map(looping, X)),
    "lanes_stream": (lambda _: stream(wrong, chunk_steps=0), lambda _: stream(looping)),
    "rewrite_loops": (lambda _: lx.rewrite_loops(wrong, max_steps=-1), lambda _: lx.rewrite_loops(wrong)(X)),
    "explain": (lambda _: lx.explain(wrong, X, argnums=7), lambda _: lx.explain(wrong, X)),
    "compare": (lambda _: lx.compare(wrong, X, kinds=NAME), lambda _: lx.compare(wrong, X)),
    "lane_report": (lambda _: lx.lane_report(NAME), None),
    "local": (lambda _: lx.local(jax.new_ref(X)), None),
    "configure": (lambda _: lx.configure(calibration=HERE), None),
    "sharded_lanes": (
        lambda _: lx.sharded_lanes(wrong, MESH, "e"),
        lambda _: lx.sharded_lanes(wrong, MESH, "d")(X),
    ),
    "durable.while_loop": (
        lambda _: durable.while_loop(wrong, wrong, X, directory=NUMBER),
        lambda path: durable.while_loop(lambda c: c.sum() < 9, wrong, X, directory=path),
    ),
    "durable.fori_loop": (
        lambda path: durable.fori_loop(0, 2, wrong, X, directory=path, keep=NEGATIVE),
        lambda path: durable.fori_loop(0, 2, wrong, X, directory=path),
    ),
    "durable.scan": (
        lambda path: durable.scan(wrong, X, X, 7, directory=path),
        lambda path: durable.scan(wrong, X, X, directory=path),
    ),
    "durable.lanes_stream": (
        lambda path: durable.lanes_stream(wrong, NUMBER, num_lanes=2, directory=path),
        lambda path: durable.lanes_stream(looping, list(X), num_lanes=2, directory=path),
    ),
    "durable.value_and_grad": (
        lambda _: durable.value_and_grad(wrong, wrong, directory=NUMBER, argnums=NEGATIVE),
        lambda path: durable.value_and_grad(looping, wrong, directory=path)(X, X, X),
    ),
    "durable.outputs": (lambda _: durable.outputs(NUMBER), None),
    "durable.steps_saved": (lambda _: durable.steps_saved(NUMBER), None),
    "stochtrace.estimate_trace": (
        lambda _: stochtrace.estimate_trace(X, jax.random.key(0)),
        lambda _: stochtrace.estimate_trace(wrong, jax.random.key(0), num_matvecs=2, size=3),
    ),
    "Auto": (lambda _: lx.Auto(memory=-1), None),
    "Checkpointed": (lambda _: lx.Checkpointed(0), None),
    "Implicit": (lambda _: lx.Implicit(rtol=-1.0), None),
    "Reversible": (lambda _: lx.Reversible(NUMBER), None),
    "Truncated": (lambda _: lx.Truncated(last=0), None),
    "Compact": (lambda _: lx.Compact(0), None),
    "Progress": (lambda _: lx.Progress(every=NEGATIVE), None),
    "stochtrace.Hutchinson": (lambda _: stochtrace.Hutchinson(NAME), None),
    "stochtrace.HutchPlusPlus": (lambda _: stochtrace.HutchPlusPlus(NAME), None),
    "stochtrace.XTrace": (lambda _: stochtrace.XTrace(NAME), None),
    "stochtrace.XNysTrace": (lambda _: stochtrace.XNysTrace(NAME), None),
    "schedule.picture": (lambda _: schedule.picture(-1, 3), None),
    "LanesStream.suspend": (lambda _: suspend_twice(), None),
}


def frames(call: Callable[[], Any]) -> list[traceback.FrameSummary]:
    """Those that Python shows of an error, from the call on."""
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any error
        call()
    return list(traceback.extract_tb(raised.value.__traceback__))[1:]


def functions_of(module: ModuleType) -> set[str]:
    prefix = module.__name__.removeprefix("loopax").removeprefix(".")
    names = {name for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    return {f"{prefix}.{name}" if prefix else name for name in names}


def test_each_public_function_is_here():
    assert functions_of(lx) | functions_of(durable) | functions_of(stochtrace) <= set(MISTAKES)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_call_shows_the_call(name: str, tmp_path: Path) -> None:
    shown = frames(lambda: MISTAKES[name][0](tmp_path))
    assert {frame.filename for frame in shown} == {HERE}
    assert name.rpartition(".")[2] in (shown[-1].line or "")


@pytest.mark.parametrize("name", [name for name, (_, function) in MISTAKES.items() if function])
def test_a_mistake_in_a_function_shows_its_line(name: str, tmp_path: Path) -> None:
    function = MISTAKES[name][1]
    assert function is not None
    shown = frames(lambda: function(tmp_path))
    assert {frame.filename for frame in shown} == {HERE}
    assert shown[-1].name == "wrong"


HALVES = lx.History(2, X)
BUFFER = lx.Buffer(2, like=1.0)


def test_a_mistake_with_an_object_shows_no_frame_of_loopax() -> None:
    """Equinox has frames of its own around modules."""
    calls = [lambda: lx.History(0), lambda: HALVES.push(X), lambda: HALVES[5], lambda: HALVES[jnp.int32(5)]]
    calls += [lambda: lx.Buffer(-1, like=1.0), lambda: BUFFER.append(X), lambda: BUFFER[7], lambda: list(BUFFER)]
    for call in calls:
        shown = frames(call)
        assert shown
        assert not any(frame.filename.startswith(LOOPAX) for frame in shown)


def reverse_through_lax(x: Any) -> Any:
    return lx.while_loop(lambda c: c < 9, lambda c: 2 * c, x, kind="lax")


def of_another_structure(x: Any) -> Any:
    return lx.fori_loop(0, 2, lambda i, c: (c, c), x)


def too_long(x: Any) -> Any:
    return lx.while_loop(lambda c: c < 9, lambda c: c + 1, x, max_steps=2)


def communicating(x: Any) -> Any:
    return lx.while_loop(lambda c: c < 9, lambda c: c + jax.lax.psum(c, "batch"), x)


def in_an_inner_loop(x: Any) -> Any:
    return lx.scan(lambda c, _: (looping(c), None), x, None, 2)[0]


@pytest.mark.parametrize(
    ("call", "function"),
    [
        (lambda: jax.jit(jax.grad(reverse_through_lax))(1.0), "<lambda>"),
        (lambda: jax.vmap(communicating, axis_name="batch")(X), "communicating"),
        (lambda: jax.vmap(too_long)(X), "too_long"),
        (lambda: jax.jit(jax.vmap(jax.grad(of_another_structure)))(X), "of_another_structure"),
        (lambda: jax.jit(jax.vmap(jax.grad(in_an_inner_loop)))(X), "wrong"),
    ],
)
def test_errors_under_transformations_show_the_users_line(call: Callable[[], Any], function: str) -> None:
    shown = frames(call)
    assert {frame.filename for frame in shown} == {HERE}
    assert shown[-1].name == function


@pytest.mark.parametrize("mode", ["off", "quiet_remove_frames", "remove_frames", "tracebackhide"])
def test_frames_are_shown_as_jax_is_asked_to(mode: str) -> None:
    """All of them; none; none, but in a cause; marked for IPython."""
    before = jax.config.values["jax_traceback_filtering"]
    jax.config.update("jax_traceback_filtering", mode)
    try:
        with pytest.raises(ValueError, match="max_steps") as raised:
            lx.fori_loop(0, 2, wrong, X, max_steps=-1)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    found = traceback.walk_tb(raised.value.__traceback__)
    ours = [frame for frame, _ in found if frame.f_code.co_filename.startswith(LOOPAX)]
    assert bool(ours) == (mode in ("off", "tracebackhide"))
    assert all(frame.f_locals["__tracebackhide__"] for frame in ours if mode == "tracebackhide")
    assert ("excludes JAX-internal frames" in str(raised.value.__cause__)) == (mode == "remove_frames")


def test_operations_have_the_users_line():
    def lines(x: Any) -> Any:
        return lx.fori_loop(0, 2, lambda i, c: c + i, x)

    printed = jax.make_jaxpr(jax.vmap(jax.grad(lines)))(X).pretty_print(source_info=True)
    assert HERE in printed
    assert LOOPAX not in printed
