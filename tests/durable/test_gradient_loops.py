"""Gradients of long runs of each loop and kind, of pytrees, rows, budgets and devices; progress, reports and errors."""

import re
from functools import partial
from typing import Any

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import loopax as lx
from loopax import durable
from loopax._src.durable import gradient, gradient_plan
from tests.durable.cases import same_bits
from tests.support.reference import assert_close

FEW: dict[str, Any] = {"chunk_steps": 5, "checkpoint_every": 1000.0}
RATE = jnp.float64(0.9)
START = jnp.arange(3.0)
XS = np.random.RandomState(0).randn(31, 3)


def f(rate, carry, x):
    carry = jnp.tanh(carry * rate + x)
    return carry, (carry**2).sum() * rate


def last_and_sum(rate, carry, total):
    return (carry**3).sum() * rate + total


def value_and_grad(path, loss=last_and_sum, step=f, **options):
    return durable.value_and_grad(loss, step, directory=path, **FEW | options)


def in_memory(rate, start, xs, step=f, loss=last_and_sum):
    def value(rate, start, xs):
        carry, ys = lx.scan(lambda carry, x: step(rate, carry, x), start, xs)
        return loss(rate, carry, ys.sum(0))

    return jax.jit(jax.value_and_grad(value, (0, 1, 2)))(rate, start, jnp.asarray(xs))


def found(result):
    value, gradients = result
    return value, (gradients.params, gradients.init, jnp.asarray(np.asarray(gradients.xs)))


# Loops.


def test_fori_loop(tmp_path):
    body = lambda rate, i, carry: jnp.sin(carry * rate) + 0.01 * i.astype(float)
    loss = lambda rate, carry: (carry**2).sum() * rate
    value, gradients = value_and_grad(tmp_path, loss, body, loop="fori_loop", length=43)(RATE, START)
    total = lambda rate, start: loss(rate, lx.fori_loop(0, 43, partial(body, rate), start))
    assert_close((value, gradients[:2]), jax.jit(jax.value_and_grad(total, (0, 1)))(RATE, START), 1e-12)
    assert gradients.xs is None


@pytest.fixture
def room(monkeypatch):
    """Sets how many states are kept on disk and in memory."""
    planned = gradient.plan

    def of(disk, memory, spread=False):
        new = {"disk": disk, "memory": memory, "is_spread": spread}
        monkeypatch.setattr(gradient, "plan", lambda *args: planned(*args)._replace(**new))

    return of


@pytest.mark.parametrize("length", [None, 60, 53])
@pytest.mark.parametrize("rooms", [None, (2, 1), (0, 3)])
def test_while_loop(tmp_path, room, length, rooms):
    """Nobody knows the number of steps: the schedule is the online one, where not all states have room."""
    if rooms:
        room(*rooms)
    body = lambda rate, carry: (carry[0] + 1, jnp.sin(carry[1] * rate))
    goes_on = lambda rate, carry: carry[0].astype(float) < 53 * jnp.sign(rate)
    loss = lambda rate, carry: (carry[1] ** 3).sum() * rate
    options = {"loop": "while_loop", "cond_fun": goes_on, "length": length}
    run = lambda: value_and_grad(tmp_path, loss, body, **options)(RATE, (0, START))
    value, gradients = run()

    def total(rate, start):
        return loss(rate, lx.while_loop(partial(goes_on, rate), partial(body, rate), (0, start), max_steps=99))

    expected = jax.jit(jax.value_and_grad(total, (0, 1)))(RATE, START)
    assert_close((value, (gradients.params, gradients.init[1])), expected, 1e-12)
    assert gradients.init[0] is None
    same_bits(run(), (value, gradients))


def test_a_while_loop_that_would_go_on(tmp_path):
    run = value_and_grad(
        tmp_path, lambda _, x: x, lambda _, x: x + 1, loop="while_loop", cond_fun=lambda _, x: x < 90, length=20
    )
    with pytest.raises(eqx.EquinoxRuntimeError, match=r"length=20\): cond_fun would go on after so many steps"):
        run(RATE, 0.0)


@pytest.mark.parametrize("length", [None, 0])
@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_no_steps(tmp_path, loop, length):
    step = {"scan": f, "fori_loop": lambda _, i, x: x, "while_loop": lambda _, x: x}[loop]
    loss = lambda rate, carry, *_: (carry * rate).sum()
    condition: dict[str, Any] = {"cond_fun": lambda *_: False} if loop == "while_loop" else {}
    condition["length"] = 0 if loop == "fori_loop" else length
    rows = [XS[:0]] if loop == "scan" else []
    value, gradients = value_and_grad(tmp_path, loss, step, loop=loop, **condition)(RATE, START, *rows)
    assert_close((value, gradients[:2]), ((START * RATE).sum(), (START.sum(), jnp.full(3, RATE))), 1e-12)


# What is stored within a chunk, and between chunks.


@pytest.mark.parametrize("kind", [lx.Residuals(), lx.Checkpointed(2), "bounded", lx.Auto(memory=100)])
def test_kinds(tmp_path, kind):
    assert_close(found(value_and_grad(tmp_path, kind=kind)(RATE, START, XS)), in_memory(RATE, START, XS), 1e-12)


def test_a_kind_without_a_gradient(tmp_path):
    with pytest.raises(Exception, match=r"reverse mode through a loop of kind `Lax\(\)`"):
        value_and_grad(tmp_path, kind="lax")(RATE, START, XS)


@pytest.mark.parametrize(("disk", "memory"), [(3, 1), (2, 0), (1, 4)])
def test_states_that_are_spread(tmp_path, room, disk, memory):
    """As where the disk is slow."""
    room(disk, memory, spread=True)
    result, info = value_and_grad(tmp_path, info=True)(RATE, START, XS)
    assert_close(found(result), in_memory(RATE, START, XS), 1e-12)
    assert info.evaluated == info.evaluations == gradient_plan.fewest_spread(7, disk, memory) / 7
    assert info.bytes_written == disk * info.state_bytes


def test_budgets(tmp_path, monkeypatch):
    """The disk is said to be fast, so that states go there."""
    monkeypatch.setattr(gradient_plan, "_transfer_seconds", lambda *_: (0.0, 0.0))
    size = 4 * 8  # a carry and a sum
    result, info = value_and_grad(tmp_path / "0", disk=3 * size, memory=2000, info=True)(RATE, START, XS)
    assert (info.states_on_disk, info.state_bytes, info.num_steps) == (3, size, 31)
    assert info.states_in_memory >= 3
    assert info.bytes_written == info.bytes_read > 0
    assert 0.0 <= info.hidden <= 1.0
    with pytest.raises(ValueError, match="the pullback of the smallest chunk takes") as error:
        value_and_grad(tmp_path / "1", memory=10, chunk_steps=None)(RATE, START, XS)
    least = int(re.findall(r"Give memory=(\d+) or more", str(error.value))[0])
    assert_close(
        found(value_and_grad(tmp_path / "2", memory=least, chunk_steps=None)(RATE, START, XS)), found(result), 1e-12
    )
    with pytest.raises(ValueError, match=f"Give memory={least} or more"):
        value_and_grad(tmp_path / "3", memory=least - 1, chunk_steps=None)(RATE, START, XS)


def test_no_room_for_a_state(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_plan, "_transfer_seconds", lambda *_: (0.0, 0.0))
    with pytest.raises(ValueError, match=r"no room for a single state, of 32 bytes.*Give disk=32 or more"):
        value_and_grad(tmp_path / "1", chunk_steps=1, disk=31, memory=560)(RATE, START, XS)
    with pytest.raises(ValueError, match=r"takes \d+ bytes with kind=Residuals\(\). Give memory=\d+ or more"):
        value_and_grad(tmp_path / "2", disk=31, memory=10, kind="residuals")(RATE, START, XS)


def test_states_that_are_larger_than_the_memory_of_a_gradient(tmp_path):
    """Who names nothing gets a gradient; who names too little, an error."""
    with lx.configure(memory=100):
        result = value_and_grad(tmp_path, chunk_steps=None)(RATE, START, XS)
    assert_close(found(result), in_memory(RATE, START, XS), 1e-12)


def test_what_more_disk_would_do(tmp_path, room):
    room(1, 1)
    _, info = value_and_grad(tmp_path, info=True)(RATE, START, XS)
    room(2, 1)
    _, more = value_and_grad(tmp_path / "more", info=True)(RATE, START, XS)
    assert info.more_disk[2 * info.state_bytes] == more.evaluations == more.evaluated < info.evaluations


# Pytrees, rows and types.


class Cell(eqx.Module):
    weight: jax.Array
    activation: Any = jnp.tanh
    scale: float = 0.5
    name: str = eqx.field(static=True, default="cell")

    def __call__(self, h, x):
        return self.activation(h @ self.weight + x) * self.scale


def test_a_module_with_numbers_and_functions_and_a_key_in_the_carry(tmp_path):
    cell = Cell(jnp.asarray(np.random.RandomState(3).randn(3, 3)))

    def step(cell, carry, x):
        key, count, h = carry
        key, now = jax.random.split(key)
        h = cell(h, x + 0.1 * jax.random.normal(now, (3,)))
        return (key, count + 1, h), h

    def loss(cell, carry, total):
        return (total * carry[1].astype(float)).sum() * cell.scale

    start = jax.random.key(0), 0, START
    value, gradients = value_and_grad(tmp_path, loss, step)(cell, start, XS)

    def total(weight, h, xs):
        module = eqx.tree_at(lambda cell: cell.weight, cell, weight)
        carry, ys = lx.scan(lambda carry, x: step(module, carry, x), (*start[:2], h), xs)
        return loss(module, carry, ys.sum(0))

    expected = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(cell.weight, START, jnp.asarray(XS))
    assert_close(found((value, gradients))[0], expected[0], 1e-12)
    assert_close((gradients.params.weight, gradients.init[2], np.asarray(gradients.xs)), expected[1], 1e-12)
    assert gradients.init[:2] == (None, None)
    assert (gradients.params.activation, gradients.params.scale) == (None, None)


def test_the_carry_is_promoted_as_in_a_loop(tmp_path):
    """The gradient of the start has the type of the start."""
    step = lambda rate, carry, x: ((carry[0] * rate + x, carry[1] + 0.5), None)
    start = 2, 1.5
    value, gradients = value_and_grad(tmp_path, lambda _, carry, __: carry[0] * carry[1], step)(RATE, start, XS[:, 0])
    assert (gradients.init[0], gradients.init[1].dtype, value.dtype) == (None, jnp.float64, jnp.float64)


def test_sums_of_half_precision_are_those_of_single(tmp_path):
    step = lambda rate, carry, x: (carry, (x * rate).astype(jnp.bfloat16))
    value, _ = value_and_grad(tmp_path, lambda _, __, total: total, step)(jnp.float64(1.0), START, np.ones(600))
    assert (value.dtype, float(value)) == (jnp.float32, 600.0)  # bfloat16 has no 257


def test_cotangents_of_outputs(tmp_path):
    def step(rate, carry, x):
        carry = jnp.tanh(carry * rate + x)
        return carry, {"y": carry**2, "z": (carry * x).sum()}

    of_ys: Any = {"y": np.random.RandomState(1).randn(31, 3), "z": np.random.RandomState(2).randn(31)}
    result = value_and_grad(tmp_path, lambda _, __, total: total, step, cotangents=of_ys)(RATE, START, XS)

    def total(rate, start, xs):
        _, ys = lx.scan(lambda carry, x: step(rate, carry, x), start, xs)
        return sum(jnp.vdot(of_ys[name], y) for name, y in ys.items())

    expected = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(RATE, START, jnp.asarray(XS))
    assert_close(found(result), expected, 1e-12)
    of_ys["z"] = None  # no cotangent
    result = value_and_grad(tmp_path / "y", lambda _, __, total: total, step, cotangents=of_ys)(RATE, START, XS)
    expected = np.vdot(of_ys["y"], lx.scan(lambda carry, x: step(RATE, carry, x), START, XS)[1]["y"])
    assert_close(result[0], expected, 1e-12)


@pytest.mark.parametrize(
    ("cotangents", "message"),
    [
        ({"y": np.ones((31, 3))}, r"they are not rows of what f returns:\n  .*key"),
        ({"y": np.ones(31), "z": np.ones(31)}, r"\['y'\]: a row of cotangents has shape \(\), the output \(3,\)"),
        ({"y": np.ones((31, 3)), "z": np.ones((31, 1))}, r"\['z'\]: a row of cotangents has shape \(1,\), the output"),
    ],
)
def test_cotangents_that_do_not_fit(tmp_path, cotangents, message):
    step = lambda rate, carry, x: (carry * rate, {"y": carry, "z": x.sum()})
    with pytest.raises(ValueError, match=message):
        value_and_grad(tmp_path, step=step, cotangents=cotangents)(RATE, START, XS)


def test_no_outputs_and_no_cotangents(tmp_path):
    step = lambda rate, carry, x: (carry * rate + x, ())
    value, _ = value_and_grad(tmp_path, lambda _, __, total: total, step, cotangents=())(RATE, START, XS)
    assert float(value) == 0.0


def test_none_in_all_arguments(tmp_path):
    step = lambda rate, carry, x: ({"h": carry["h"] * rate["r"] + x["x"], "n": None}, None)
    given = {"r": RATE, "n": None}, {"h": START, "n": None}, {"x": XS, "n": None}
    value, gradients = value_and_grad(tmp_path, lambda _, carry, __: carry["h"].sum(), step)(*given)
    expected = in_memory(RATE, START, XS, lambda r, h, x: (h * r + x, h), lambda _, h, __: h.sum())
    found = gradients.params["r"], gradients.init["h"], np.asarray(gradients.xs["x"])
    assert_close((value, found), expected, 1e-12)
    assert gradients.params["n"] is gradients.init["n"] is gradients.xs["n"] is None


def test_what_a_function_closes_over_may_change_between_calls(tmp_path):
    """Compiled functions are those of what is stored as the program."""
    factors = np.array([0.5, 0.6, 0.7])
    step = lambda rate, carry, x: (jnp.sin(carry * rate * factors) + x, None)
    loss = lambda rate, carry, ys: carry.sum()
    run = lambda name: value_and_grad(tmp_path / name, loss, step)(RATE, START, XS)
    before = run("before")[0]
    factors *= 1.5
    other = in_memory(RATE, START, XS, lambda r, h, x: (step(r, h, x)[0], h), loss)[0]
    assert_close(run("after")[0], other, 1e-12)
    assert abs(float(before - other)) > 1e-3


def test_under_disable_jit(tmp_path):
    with jax.disable_jit():
        result = value_and_grad(tmp_path)(RATE, START, XS)
    assert_close(found(result), in_memory(RATE, START, XS), 1e-12)


def test_rows_that_are_on_disk(tmp_path):
    """Those of another durable run, and of a file that NumPy maps."""
    _, rows = durable.scan(lambda _, x: (0.0, jnp.asarray(x)), 0.0, XS, directory=tmp_path / "rows")
    np.save(tmp_path / "xs.npy", XS)
    mapped = np.load(tmp_path / "xs.npy", mmap_mode="r")
    np.save(tmp_path / "big.npy", XS.astype(">f8"))  # of the other order of bytes
    other = np.load(tmp_path / "big.npy", mmap_mode="r")
    expected = found(value_and_grad(tmp_path / "memory")(RATE, START, XS))
    same_bits(found(value_and_grad(tmp_path / "rows of a run")(RATE, START, rows)), expected)
    same_bits(found(value_and_grad(tmp_path / "other")(RATE, START, other)), expected)
    result = value_and_grad(tmp_path / "mapped")(RATE, START, mapped)
    same_bits(found(result), expected)
    same_bits(found(value_and_grad(tmp_path / "device")(RATE, START, jnp.asarray(XS))), expected)
    (written,) = durable.outputs(tmp_path / "mapped").values()
    np.testing.assert_array_equal(written[3:7], np.asarray(result[1].xs)[3:7])


def test_argnums(tmp_path):
    expected = in_memory(RATE, START, XS)
    value, gradients = value_and_grad(tmp_path, argnums=0)(RATE, START, XS)
    assert_close((value, gradients.params), (expected[0], expected[1][0]), 1e-12)
    assert gradients.init is gradients.xs is None
    assert not (tmp_path / "outputs").exists()


# Devices.


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_carry_that_is_spread_over_devices(tmp_path, room, monkeypatch, axes):
    """A chunk takes an eighth of the memory on each of eight devices, and gradients are spread as what they are of."""
    room(3, 1)
    memory: list[int] = []
    programs = gradient_plan.Programs

    def noting(*args):
        memory.append((made := programs(*args)).memory)
        return made

    monkeypatch.setattr(gradient_plan, "Programs", noting)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axes,))
    spread = NamedSharding(mesh, P("d"))
    step = lambda rates, u, x: (jnp.sin(u) * rates + x, (u**2).sum())
    loss = lambda rates, u, total: (u * rates).sum() + total
    rates, start = jnp.linspace(0.5, 0.9, 4096), jnp.linspace(0.0, 1.0, 4096)
    xs = np.sin(np.arange(31.0))
    expected = found(value_and_grad(tmp_path / "one", loss, step)(rates, start, xs))
    with jax.set_mesh(mesh):
        given = jax.device_put(rates, spread), jax.device_put(start, spread), xs
        result = value_and_grad(tmp_path / "eight", loss, step)(*given)
        again = value_and_grad(tmp_path / "eight", loss, step)(*given)
    same_bits(found(again), found(result))
    assert result[1].params.sharding.spec == result[1].init.sharding.spec == P("d")
    assert_close(jax.tree.map(np.asarray, found(result)), jax.tree.map(np.asarray, expected), 1e-12)
    assert memory[1] == memory[2] <= 1.1 / 8 * memory[0]


# Progress, and errors.


def test_progress_says_which_pass_and_how_much_is_left(tmp_path, capfd):
    value_and_grad(tmp_path, progress=lx.Progress("waves", every=1e-6, style="text"))(RATE, START, XS)
    said = capfd.readouterr().err
    assert "waves, forward: 30 evaluations in" in said
    assert re.search(r"waves, backward: \d+ evaluations in", said)


WRONG: list[tuple[Any, Any, Any, str]] = [
    ({"loop": "for"}, (), ValueError, "got 'for', expected one of 'scan', 'fori_loop', 'while_loop'"),
    ({"loop": "fori_loop"}, (RATE, START), ValueError, "nothing else says how many steps there are"),
    ({"length": 30}, (RATE, START, XS), ValueError, r"length=30\): xs and cotangents have 31 rows"),
    ({"length": -1}, (RATE, START, XS), ValueError, "got -1, expected an int from 0 to"),
    ({"cond_fun": f}, (), ValueError, "only loop='while_loop' has a condition, and this is a scan"),
    ({"loop": "while_loop"}, (), TypeError, "which says whether a while_loop goes on: got NoneType None"),
    ({"loop": "fori_loop", "cotangents": XS}, (), ValueError, "only loop='scan' has outputs"),
    ({"loop": "fori_loop", "length": 3}, (RATE, START, XS), TypeError, "xs are the rows of loop='scan'"),
    ({}, (RATE, START, (XS, XS[:3])), ValueError, r"as many rows in xs and cotangents. Got:\n  xs\[0\]: \(31, 3\)"),
    ({}, (RATE, START, (XS, 3.0)), ValueError, r"xs\[1\]: \(\)"),
    (
        {"loss": lambda *_: START},
        (RATE, START, XS),
        TypeError,
        r"must return one real number \(a scalar\). Got float64",
    ),
    ({"loss": lambda *_: 1j}, (RATE, START, XS), TypeError, "must return one real number"),
    (
        {"loss": lambda params: params},
        (RATE, START, XS),
        TypeError,
        r"loss of .* is called as `loss\(params, carry, sum",
    ),
    ({"step": lambda params, carry: carry}, (RATE, START, XS), TypeError, r"called as `f\(params, carry, x\)`"),
    ({"step": lambda _, carry, x: (carry[:2], x)}, (RATE, START, XS), Exception, r"float64\[2\]"),
    (
        {"step": lambda r, c, x: (c, jax.random.key(0))},
        (RATE, START, XS),
        TypeError,
        "outputs are added up, and key<fry>",
    ),
    ({"memory": -1}, (), ValueError, r"memory=...\): got -1"),
    ({"disk": 1.5}, (), TypeError, r"disk=...\): got float 1.5, expected an int, a number of bytes"),
    ({"argnums": 3}, (), ValueError, "got 3, expected an int from 0 to 2"),
    ({"kind": "implicit"}, (), ValueError, "is a derivative"),
    ({"kind": lx.Reversible(lambda c: c)}, (), ValueError, r"kind=Reversible\(...\)\): a chunk is more than a step"),
    ({"info": 1}, (), TypeError, "info"),
    ({}, (nnx.Linear(3, 3, rngs=nnx.Rngs(0)), START, XS), TypeError, r"params holds NNX objects.*nnx.split"),
]


@pytest.mark.parametrize(("options", "arguments", "error", "message"), WRONG)
def test_what_is_asked_for_wrongly(tmp_path, options, arguments, error, message):
    with pytest.raises(error, match=message):
        value_and_grad(tmp_path, **options)(*arguments)


def test_inside_of_a_transformation(tmp_path):
    with pytest.raises(TypeError, match=r"cannot be called inside of.*`jax.value_and_grad` of a loop of loopax"):
        jax.jit(lambda rate: value_and_grad(tmp_path)(rate, START, XS)[0])(RATE)
