"""`Tuned`: it takes what is fastest by its measurements, remembers it, and measures nothing where it cannot."""

import json
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import loopax as lx
from loopax._src.core import Checkpoints, EveryCarry, EveryResidual
from loopax._src.core.autodiff import measuring, planning
from loopax._src.kinds import tuned
from tests.kinds.test_auto import chosen

X = jnp.linspace(0.1, 0.9, 8)
STEPS = 40
FASTEST = {"residuals": EveryResidual, "bounded": EveryCarry, "checkpointed": Checkpoints}


class Measurements:
    def __init__(self):
        self.calls, self.fastest = [], "bounded"

    def __call__(self, given, plans, step, deadline, num_lanes):
        self.calls.append(given)
        return [1.0 if isinstance(plan, FASTEST[self.fastest]) else 2.0 for plan in plans]


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(tuned, "_process", {})
    jax.clear_caches()


@pytest.fixture
def timed(monkeypatch):
    """Count measurements, and say what they find: the fastest of residuals, carries and checkpoints."""
    measurements = Measurements()
    monkeypatch.setattr(planning, "measured", measurements)
    return measurements


def swung(x, kind, steps=STEPS, **options):
    return lx.fori_loop(0, steps, lambda _, x: jnp.sin(x) + 0.1 * x**2, x, kind=kind, **options).sum()


def slope(kind, **options):
    return jax.grad(lambda x: swung(x, kind, **options))


@pytest.mark.parametrize("name", FASTEST)
def test_it_takes_the_fastest(timed, name):
    timed.fastest = name
    assert isinstance(chosen(slope(lx.Tuned()), X), FASTEST[name])


def test_the_reason_has_the_times(timed):
    plan = chosen(slope(lx.Tuned()), X)
    assert "nanoseconds for a step: Residuals 2, Bounded 1, Checkpointed 2" in plan.reason


def test_what_is_slower_by_little_and_smaller_is_taken(monkeypatch):
    monkeypatch.setattr(planning, "measured", lambda _, plans, *__: [1.0, 1.02, 1.04][: len(plans)])
    assert isinstance(chosen(slope(lx.Tuned()), X), Checkpoints)


def test_plans_that_time_was_too_short_for_are_not_taken(monkeypatch):
    monkeypatch.setattr(planning, "measured", lambda _, plans, *__: [5.0, None, None][: len(plans)])
    assert isinstance(chosen(slope(lx.Tuned()), X), EveryResidual)


def test_the_memory_is_that_of_auto(timed):
    timed.fastest = "residuals"
    assert isinstance(chosen(slope(lx.Tuned(memory=4 * X.nbytes)), X), Checkpoints)
    with pytest.raises(ValueError, match="at least one carry"):
        slope(lx.Tuned(memory=1))(X)


# ---- what is remembered


def test_a_loop_is_measured_once(timed):
    for _ in range(2):
        slope(lx.Tuned())(X)
        jax.clear_caches()
    assert len(timed.calls) == 1
    slope(lx.Tuned())(X.astype(jnp.float32))  # of other types
    assert len(timed.calls) == 2


def test_another_process_finds_the_choice_in_the_folder(timed, tmp_path, monkeypatch):
    folder = tmp_path / "choices"
    slope(lx.Tuned(cache=folder))(X)
    monkeypatch.setattr(tuned, "_process", {})
    jax.clear_caches()
    assert isinstance(chosen(slope(lx.Tuned(cache=str(folder))), X), EveryCarry)
    assert len(timed.calls) == 1
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_a_choice_that_the_process_remembers_is_written_too(timed, tmp_path):
    for cache in (None, tmp_path):
        slope(lx.Tuned(cache=cache))(X)
        jax.clear_caches()
    assert len(timed.calls) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"chosen": "Bounded()"}', '{"chosen": "Other()", "reason": ""}'])
def test_a_damaged_entry_is_measured_again(timed, tmp_path, monkeypatch, text):
    slope(lx.Tuned(cache=tmp_path))(X)
    (entry,) = tmp_path.iterdir()
    entry.write_text(text)
    monkeypatch.setattr(tuned, "_process", {})
    jax.clear_caches()
    slope(lx.Tuned(cache=tmp_path))(X)
    assert len(timed.calls) == 2
    assert json.loads(entry.read_text())["chosen"] == "Bounded()"


def test_a_folder_that_cannot_be_written_to_warns(timed, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the choice is not kept"):
        assert isinstance(chosen(slope(lx.Tuned(cache=tmp_path / "file")), X), EveryCarry)


def test_compare_fills_the_folder(timed, tmp_path):
    found = lx.compare(lambda x: swung(x, lx.Tuned(cache=tmp_path)), X, rounds=1, cache=tmp_path)
    timed.calls.clear()
    jax.clear_caches()
    reason = chosen(slope(lx.Tuned(cache=tmp_path)), X).reason
    assert reason.startswith("compared, milliseconds: Checkpointed()")
    assert timed.calls == []
    fastest = min(found.rows, key=lambda row: row.gradient_ms)
    assert json.loads(next(tmp_path.iterdir()).read_text())["chosen"] in fastest.name


def test_compare_takes_a_path(tmp_path):
    with pytest.raises(TypeError, match="cache"):
        lx.compare(lambda x: swung(x, "auto"), X, cache=3)  # type: ignore


# ---- measurements


DTYPES = {
    "float32": lambda x: x.astype(jnp.float32),
    "bfloat16": lambda x: x.astype(jnp.bfloat16),
    "complex64": lambda x: x.astype(jnp.complex64),
}


@pytest.mark.parametrize("transform", ["grad", "jit", "lanes of gradients", "gradient of lanes", "second"])
def test_gradients_are_those_of_other_kinds(transform):
    def of(kind):
        f = lambda x: swung(x, kind)
        return {
            "grad": jax.grad(f),
            "jit": jax.jit(jax.grad(f)),
            "lanes of gradients": jax.vmap(jax.grad(f)),
            "gradient of lanes": jax.grad(lambda x: jax.vmap(f)(x).sum()),
            "second": jax.grad(lambda x: jax.grad(f)(x).sum()),
        }[transform](X.reshape(2, 4))

    np.testing.assert_allclose(of(lx.Tuned()), of(lx.Checkpointed()), rtol=1e-9)


@pytest.mark.parametrize("num_lanes", [None, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_carries_of_any_type_are_measured(dtype, num_lanes):
    def loss(x):
        def body(c):
            i, x, key, flag = c
            key, _ = jax.random.split(key)
            return i + 1, x * x, key, ~flag

        start = jnp.int32(0), DTYPES[dtype](x), jax.random.key(0), jnp.bool_(True)
        end = lx.while_loop(lambda c: c[0] < 3, body, start, max_steps=5, kind=lx.Tuned(num_lanes=num_lanes))
        return jnp.real(end[1]).sum().astype(float)

    assert "measured in" in chosen(jax.grad(loss), X).reason


def test_nothing_happens_while_it_is_measured():
    called = []

    def body(i, x):
        jax.debug.callback(lambda: called.append(1))
        return jnp.sin(x)

    gradient = jax.grad(lambda x: lx.fori_loop(0, 5, body, x, kind=lx.Tuned()).sum())
    assert "measured in" in chosen(gradient, X).reason
    jax.effects_barrier()
    assert called == []


@pytest.mark.parametrize("library", [lax, lx])
def test_inner_loops_end_soon(library):
    """The made-up numbers would never end them."""

    def factor(x):
        start = lax.stop_gradient((x, x[0]))
        return library.while_loop(lambda c: c[1] > 0.5, lambda c: (jnp.sin(c[0]), c[1] * 1.0), start)[0]

    gradient = jax.grad(lambda x: lx.fori_loop(0, STEPS, lambda _, x: x * factor(x), x, kind=lx.Tuned()).sum())
    assert "measured in" in str(jax.make_jaxpr(gradient)(X))


def test_a_loop_that_ends_by_its_values_is_measured():
    loss = lambda x: lx.while_loop(lambda x: x.sum() < 0, jnp.sin, x, max_steps=STEPS, kind=lx.Tuned()).sum()
    assert "measured in" in chosen(jax.grad(loss), X).reason


def test_a_loop_that_looks_at_its_steps_is_measured():
    assert "measured in" in chosen(slope(lx.Tuned(), finite=True), X).reason


def test_what_is_made_up_may_become_nan():
    with jax.debug_nans(True), jax.debug_infs(True):
        gradient = jax.grad(lambda x: lx.fori_loop(0, 9, lambda _, x: x / (1.0 - x**3), x, kind=lx.Tuned()).sum())
        assert "measured in" in chosen(gradient, X).reason


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_few_steps(steps, reverse):
    xs = jnp.linspace(0.1, 0.9, steps)
    loss = lambda kind: lambda x: lx.scan(lambda c, x: (jnp.sin(c) * x, c), x, xs, reverse=reverse, kind=kind)[0].sum()
    np.testing.assert_allclose(jax.grad(loss("tuned"))(X), jax.grad(loss("residuals"))(X))


@pytest.fixture
def measured_calls(monkeypatch):
    """The programs that would be timed, with their arguments."""
    taken = []
    monkeypatch.setattr(measuring, "_least_seconds", lambda calls, _: taken.extend(calls.values()) or {})
    return taken


@pytest.mark.parametrize("num_lanes", [None, 1, 5])
def test_lanes_outside_of_the_gradient_are_measured_together(measured_calls, num_lanes):
    """They share what is constant in the loop."""
    weights, rows = jnp.eye(8) * 0.5, jnp.ones((20, 3))

    def loss(x, weights):
        step = lambda x, row: (jnp.tanh(weights @ x) * row[0], None)
        return lx.scan(step, x, rows, kind=lx.Tuned(num_lanes=num_lanes))[0].sum()

    with pytest.warns(UserWarning, match="none of the candidates"):
        jax.make_jaxpr(jax.vmap(jax.grad(loss, (0, 1)), (0, None)))(jnp.ones((2, 8)), weights)
    lanes = () if num_lanes in (None, 1) else (num_lanes,)
    assert measured_calls
    for call in measured_calls:
        shapes = {x.shape for x in jax.tree.leaves(call.args) if x.ndim}
        assert shapes == {(8, 8), (*lanes, 8), (*lanes, 20, 3)}


@pytest.mark.parametrize("library", ["while_loop", "fori_loop"])
def test_lanes_that_end_by_themselves_are_measured_with_masks(measured_calls, library):
    def loss(n, x):
        if library == "fori_loop":
            return lx.fori_loop(0, n, lambda _, x: jnp.sin(x), x, max_steps=20, kind=lx.Tuned(num_lanes=5)).sum()
        step = lambda c: (c[0] + 1, jnp.sin(c[1]))
        return lx.while_loop(lambda c: c[0] < n, step, (0, x), max_steps=20, kind=lx.Tuned(num_lanes=5))[1].sum()

    with pytest.warns(UserWarning, match="none of the candidates"):
        jax.make_jaxpr(jax.vmap(jax.grad(loss, 1)))(jnp.arange(5), jnp.ones((5, 8)))
    assert measured_calls
    assert all(re.search(r"s32\[5\]\S* parameter", call.func.as_text()) for call in measured_calls)


def test_a_choice_for_other_lanes_is_another(timed):
    for num_lanes in (None, 5, 6, 5):
        timed.fastest = "residuals" if num_lanes == 5 else "checkpointed"
        plan = chosen(slope(lx.Tuned(num_lanes=num_lanes)), X)
        assert isinstance(plan, FASTEST[timed.fastest])
        assert (f"of all {num_lanes} lanes" in plan.reason) == (num_lanes is not None)
    assert len(timed.calls) == 3


def test_what_is_measured_changes_few_elements_where_the_gradient_does(measured_calls):
    def loss(x):  # a delay equation, whose last values stand in the carry
        step = lambda i, x: x.at[i % 1000].add(jnp.sin(x[(i + 1) % 1000]))
        return lx.fori_loop(0, 50, step, x, kind=lx.Tuned()).sum()

    with pytest.warns(UserWarning, match="none of the candidates"):
        jax.make_jaxpr(jax.grad(loss))(jnp.ones(1000))
    assert measured_calls
    for call in measured_calls:
        assert not re.search(r"f64\[1000\]\S* add\(", call.func.as_text())


def test_where_the_device_runs_nothing_auto_chooses_with_a_warning(monkeypatch):
    def refused(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(measuring, "_gradient", lambda *_: refused)
    with pytest.warns(UserWarning, match="the device runs none"):
        slope(lx.Tuned())(X)


def test_where_one_kind_is_possible_nothing_is_measured(timed):
    loss = lambda x: lx.while_loop(lambda x: x.sum() > 1, jnp.sin, x, kind=lx.Tuned()).sum()
    assert isinstance(chosen(jax.grad(loss), X), Checkpoints)
    assert timed.calls == []


def test_in_a_shard_map_auto_chooses_with_a_warning(timed):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    with pytest.warns(UserWarning, match="shard_map"):
        jax.shard_map(slope(lx.Tuned()), mesh=mesh, in_specs=spec, out_specs=spec)(X)
    assert timed.calls == []


def test_symbolic_sizes_are_not_measured(timed):
    (size,) = jax.export.symbolic_shape("n")
    with pytest.warns(UserWarning, match="sizes are not known"):
        jax.export.export(jax.jit(slope(lx.Tuned())))(jax.ShapeDtypeStruct((size,), float))
    assert timed.calls == []


# ---- arguments


def test_arguments():
    assert isinstance(chosen(slope("tuned"), X), tuple(FASTEST.values()))
    assert repr(lx.Tuned()) == "Tuned()"
    assert repr(lx.Tuned(memory=100, cache="a")) == "Tuned(memory=100, cache='a')"
    with pytest.raises(TypeError, match="cache"):
        lx.Tuned(cache=3)  # type: ignore
    assert repr(lx.Tuned(num_lanes=3)) == "Tuned(num_lanes=3)"
    with pytest.raises(ValueError, match="memory"):
        lx.Tuned(memory=0)
    with pytest.raises(ValueError, match="num_lanes"):
        lx.Tuned(num_lanes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jax.jit(lambda x: swung(x, lx.Tuned()))(X).shape == ()  # without a gradient nothing is measured
