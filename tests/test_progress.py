"""What loops report while they run: how often, of what, and only once."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import loopax as lx
from loopax._src import progress as public
from loopax._src.core.ir.progress import Reporting, Reports
from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.core.lowering.while_loop import LoopState, RowLoop, Steps, Watch

STRIDE = 10  # of the displays below: a report after the first step, and after every ten more


class Recorder:
    """Displays that draw nothing, and remember what they are told."""

    def __init__(self, stride=STRIDE):
        self.stride = stride
        self.begun, self.reports, self.ended, self.closed = [], [], [], []

    def begin(self, key, label, every, style, *, total, parts, lanes, size):
        self.begun.append((label, total, parts, lanes))
        return len(self.begun)

    def report(self, number, steps, active):
        self.reports.append((number, steps, active))
        return self.stride

    def end(self, number, steps):
        self.ended.append((number, steps))

    def close(self, key):
        self.closed.append(key)

    @property
    def steps(self):
        """Of all runs, in the order in which they were reported."""
        return [steps for _, steps, _ in self.reports]

    @property
    def lanes(self):
        return [active for _, _, active in self.reports]


def expected(steps, stride=STRIDE):
    return list(range(1, steps, stride))


@pytest.fixture
def recorder(monkeypatch):
    found = Recorder()
    monkeypatch.setattr(public, "DISPLAYS", found)
    return found


def once(recorder, steps, total=None):
    """One run of so many steps was shown, and nothing else."""
    assert [end for _, end in recorder.ended] == [steps]
    assert recorder.steps == expected(steps)
    assert recorder.begun[0][1] == (steps if total is None else total)
    assert len(recorder.begun) == 1


def summed(n, progress, **options):
    return lx.fori_loop(0, n, lambda i, x: jnp.sin(x) + 0.1, 1.0, progress=progress, **options)


def counted(n, progress, **options):
    def body(carry):
        return carry[0] + 1, jnp.sin(carry[1])

    return lx.while_loop(lambda carry: carry[0] < n, body, (0, 1.0), progress=progress, **options)[1]


def scanned(n, progress, **options):
    xs = jnp.linspace(0.0, 1.0, 40)
    return lx.scan(lambda c, x: (jnp.sin(c + x), c), 1.0, xs, length=n, progress=progress, **options)[0]


def rolled_out(n, progress, **options):
    return lx.rollout(lambda x: (jnp.sin(x) + 0.1, x), 1.0, n, max_steps=40, progress=progress, **options).state


LOOPS = {"fori": summed, "while": counted, "scan": scanned, "rollout": rolled_out}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("compiled", [False, True])
def test_every_loop_reports_its_steps(recorder, name, compiled):
    loop = LOOPS[name]
    n, run = 35, lambda n: loop(n, True)
    value = (jax.jit(run) if compiled else run)(n)
    jax.block_until_ready(value)
    once(recorder, 35, -1 if name == "while" else 35)
    assert value == loop(n, None)
    assert set(recorder.lanes) == {-1}


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        (summed, {"unroll": 4}),
        (summed, {"max_steps": 64}),
        (scanned, {"reverse": True}),
        (scanned, {"unroll": 3}),
        (rolled_out, {"save_every": 4}),
        (counted, {"max_steps": 64}),
    ],
)
def test_options(recorder, loop, options):
    value = jax.jit(lambda n: loop(n, True, **options))(35)
    jax.block_until_ready(value)
    once(recorder, 35, -1 if loop is counted else 35)
    assert value == loop(35, None, **options)


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("name", LOOPS)
def test_few_steps(recorder, name, n):
    jax.block_until_ready(jax.jit(lambda n: LOOPS[name](n, True))(n))
    once(recorder, n, -1 if name == "while" else n)


def test_no_rows(recorder):
    lx.scan(lambda c, x: (c + x, c), 0.0, jnp.zeros(0), progress=True)
    assert recorder.ended == [(1, 0)]


def test_one_step_at_most(recorder):
    lx.while_loop(lambda x: x < 3.0, lambda x: x + 1.0, 0.0, max_steps=1, throw=False, progress=True)
    assert recorder.ended == [(1, 1)]


def test_stop(recorder):
    stop = lambda c, y: c > 20.0
    _, ys = lx.scan(lambda c, x: (c + x, c), 0.0, jnp.ones(30), stop=stop, progress=True)
    once(recorder, 21, -1)
    assert jnp.count_nonzero(ys) == 20


def test_two_calls_are_one_trace(recorder):
    traces = []

    def body(i, x):
        traces.append(None)
        return x + 1.0

    for _ in range(2):
        lx.fori_loop(0, 5, body, 0.0, progress=lx.Progress())
    assert len(traces) == 1
    assert len(recorder.ended) == 2


def test_disable_jit(recorder):
    with jax.disable_jit():
        counted(12, True)
    once(recorder, 12, -1)


@pytest.mark.parametrize("name", LOOPS)
def test_without_progress_the_program_is_the_same(name):
    """No callback, and not one operation more."""
    loop = LOOPS[name]

    def program(progress):
        return jax.jit(jax.grad(lambda x: loop(7, progress) * x)).lower(1.0).as_text()

    assert "callback" not in program(None)
    assert program(None) == program(False)
    assert "callback" in program(True)


# ---- gradients


KINDS = {
    "checkpointed": lx.Checkpointed(),
    "few": lx.Checkpointed(3),
    "bounded": lx.Bounded(),
    "residuals": lx.Residuals(),
    "auto": lx.Auto(),
}


def powers(n, progress, **options):
    """A value of which the derivative needs every carry."""

    def value(x):
        return lx.fori_loop(0, n, lambda i, c: jnp.sin(c * x), x, progress=progress, **options)

    return value


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_shows_the_forward_pass(recorder, kind):
    options = {"kind": KINDS[kind], "max_steps": 64}
    value = jax.jit(jax.grad(powers(35, True, **options)))(0.7)
    once(recorder, 35)
    assert value == jax.jit(jax.grad(powers(35, None, **options)))(0.7)


@pytest.mark.parametrize("kind", ["checkpointed", "few"])
def test_a_gradient_of_several_steps_at_a_time(recorder, kind):
    options = {"kind": KINDS[kind], "max_steps": 64, "unroll": 3}
    value = jax.jit(jax.grad(powers(35, True, **options)))(0.7)
    once(recorder, 35)
    assert value == jax.jit(jax.grad(powers(35, None, **options)))(0.7)


def test_gradient_without_a_bound(recorder):
    def f(x, progress):
        keep = lambda c: c[0] < 35
        return lx.while_loop(keep, lambda c: (c[0] + 1, jnp.sin(c[1] * x)), (0, x), progress=progress)[1]

    value = jax.jit(jax.grad(lambda x: f(x, True)))(0.7)
    once(recorder, 35, -1)
    assert value == jax.jit(jax.grad(lambda x: f(x, None)))(0.7)


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_gradient_of_lanes(recorder, lanes):
    options = {"lanes": lx.Compact(min_lanes=2)} if lanes == "compact" else {}

    def total(progress):
        return lambda xs, ns: jnp.sum(jax.vmap(lambda x, n: powers(n, progress, **options)(x))(xs, ns))

    xs, ns = jnp.linspace(0.1, 0.9, 4), jnp.array([3, 35, 7, 20])
    value = jax.jit(jax.grad(total(True)))(xs, ns)
    np.testing.assert_array_equal(value, jax.jit(jax.grad(total(None)))(xs, ns))
    assert len(recorder.ended) == recorder.begun[0][2]
    assert max(steps for _, steps in recorder.ended) == 35


@pytest.mark.parametrize("transform", [jax.hessian, jax.jacfwd, jax.value_and_grad])
def test_higher_derivatives(recorder, transform):
    value = jax.jit(transform(powers(25, True)))(0.7)
    once(recorder, 25)
    assert value == jax.jit(transform(powers(25, None)))(0.7)


def test_jax_checkpoint(recorder):
    found = jax.jit(jax.value_and_grad(jax.checkpoint(powers(25, True))))(0.7)
    once(recorder, 25)
    assert found == jax.jit(jax.value_and_grad(jax.checkpoint(powers(25, None))))(0.7)


@pytest.mark.parametrize("transform", [lambda f: jax.grad(jax.grad(f)), lambda f: jax.grad(jax.checkpoint(f))])
def test_a_forward_pass_that_nobody_needs_shows_nothing(recorder, transform):
    """Other loops evaluate the steps again, with what the derivative needs of them."""
    value = jax.jit(transform(powers(25, True)))(0.7)
    assert recorder.begun == []
    assert value == jax.jit(transform(powers(25, None)))(0.7)


def test_linearize_then_apply(recorder):
    _, derivative = jax.linearize(powers(25, True), 0.7)
    once(recorder, 25)
    derivative(1.0)
    once(recorder, 25)


def test_linear_transpose_has_no_forward_pass(recorder):
    f = lambda x: lx.fori_loop(0, 25, lambda i, c: 2 * c, x, progress=True)
    jax.linear_transpose(f, 1.0)(1.0)
    assert recorder.begun == []


# ---- loops in loops


def nested(progress, outer=4, inner=12, **options):
    def value(x):
        def step(i, c):
            return lx.fori_loop(0, inner, lambda j, c: jnp.sin(c * x), c, progress=progress)

        return lx.fori_loop(0, outer, step, x, **options)

    return value


def test_inner_loops(recorder):
    jax.block_until_ready(jax.jit(nested(True))(0.7))
    assert [end for _, end in recorder.ended] == [12] * 4
    assert recorder.steps == expected(12) * 4


@pytest.mark.parametrize("kind", ["checkpointed", "few", "bounded", "residuals"])
def test_inner_loops_in_a_gradient_are_not_replayed(recorder, kind):
    value = jax.jit(jax.grad(nested(True, kind=KINDS[kind])))(0.7)
    assert [end for _, end in recorder.ended] == [12] * 4
    assert value == jax.jit(jax.grad(nested(None, kind=KINDS[kind])))(0.7)


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda f: lambda x: jax.lax.cond(x > 0, f, lambda x: x, x)])
def test_inner_loops_inside_something_else(recorder, wrap):
    def value(x):
        step = wrap(lambda c: lx.fori_loop(0, 12, lambda j, c: jnp.sin(c * 0.9), c, progress=True))
        return lx.fori_loop(0, 4, lambda i, c: step(c), x)

    jax.block_until_ready(jax.jit(jax.grad(value))(0.7))
    assert [end for _, end in recorder.ended] == [12] * 4


def test_inside_lax_scan(recorder):
    def value(x):
        return jax.lax.scan(lambda c, _: (powers(12, True)(c), None), x, None, length=4)[0]

    jax.block_until_ready(jax.jit(jax.grad(value))(0.7))
    assert [end for _, end in recorder.ended] == [12] * 4


# ---- lanes


def test_a_batch_is_shown_as_one(recorder):
    ns = jnp.array([5, 35, 12, 0])
    values = jax.jit(jax.vmap(lambda n: counted(n, True)))(ns)
    once(recorder, 35, -1)
    assert recorder.lanes == [3, 2, 1, 1]
    np.testing.assert_array_equal(values, jax.vmap(lambda n: counted(n, None))(ns))


def test_lanes_with_known_steps(recorder):
    jax.block_until_ready(jax.jit(jax.vmap(lambda n: summed(n, True)))(jnp.array([5, 35, 12, 0])))
    once(recorder, 35)
    assert recorder.lanes == [3, 2, 1, 1]


def test_lanes_of_lanes(recorder):
    ns = jnp.array([[5, 35], [12, 0]])
    jax.block_until_ready(jax.jit(jax.vmap(jax.vmap(lambda n: counted(n, True))))(ns))
    once(recorder, 35, -1)
    assert recorder.lanes == [3, 2, 1, 1]


def test_lanes_that_take_the_same_steps(recorder):
    xs = jnp.linspace(0.0, 1.0, 5)
    jax.block_until_ready(jax.jit(jax.vmap(powers(35, True)))(xs))
    once(recorder, 35)
    assert set(recorder.lanes) == {-1}


def test_vmap_of_grad(recorder):
    ns, xs = jnp.array([5, 35, 12]), jnp.array([0.3, 0.5, 0.7])
    values = jax.jit(jax.vmap(lambda x, n: jax.grad(powers(n, True))(x)))(xs, ns)
    once(recorder, 35)
    assert recorder.lanes == [3, 2, 1, 1]
    np.testing.assert_array_equal(values, jax.vmap(lambda x, n: jax.grad(powers(n, None))(x))(xs, ns))


@pytest.mark.parametrize("loop", [counted, summed])
def test_compact_lanes_are_one_display(recorder, loop):
    ns = jnp.array([3, 35, 4, 6, 2, 5, 30, 1])
    lanes = lx.Compact(min_lanes=2)
    values = jax.jit(jax.vmap(lambda n: loop(n, True, lanes=lanes)))(ns)
    np.testing.assert_array_equal(values, jax.vmap(lambda n: loop(n, None, lanes=lanes))(ns))
    (parts,) = {parts for _, _, parts, _ in recorder.begun}
    assert len(recorder.begun) == len(recorder.ended) == parts > 1
    if loop is counted:
        assert sum(steps for _, steps in recorder.ended) == 35


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_a_batch_in_jax_checkpoint(recorder, lanes):
    options: dict[str, Any] = {"lanes": lx.Compact(min_lanes=2)} if lanes == "compact" else {}

    def loop(x, n):
        keep = lambda c: c[0] < n
        step = lambda c: (c[0] + 1, jnp.sin(c[1] * x))
        return lx.while_loop(keep, step, (0, x), max_steps=64, progress=True, **options)[1]

    def value(xs, ns):
        return jnp.sum(jax.checkpoint(jax.vmap(loop))(xs, ns))

    xs, ns = jnp.linspace(0.1, 0.9, 4), jnp.array([3, 35, 7, 20])
    jax.block_until_ready(jax.jit(jax.value_and_grad(value))(xs, ns))
    assert len(recorder.ended) == recorder.begun[0][2]
    assert sum(steps for _, steps in recorder.ended) == 35


def test_lanes_with_large_constants_of_their_own(recorder):
    """Such a batch runs in stretches, with constants that are lent anew for each."""
    weights, ns = jnp.ones((3, 100, 64)) / 100, jnp.array([5, 35, 12])

    def loop(progress):
        step = lambda w: lambda i, x: jnp.tanh(x @ w @ w.T)
        run = lambda w, n: lx.fori_loop(0, n, step(w), jnp.ones(100), progress=progress)
        return jax.jit(jax.vmap(run))(weights, ns)

    values = loop(True)
    once(recorder, 35)
    assert recorder.lanes == [3, 2, 1, 1]
    np.testing.assert_array_equal(values, loop(None))


def test_free_lanes(recorder):
    def value(n):
        def step(i, c):
            return lx.fori_loop(0, i, lambda j, c: jnp.sin(c), c + 1.0)

        return lx.fori_loop(0, n, step, 0.0, lanes="free", max_steps=8, progress=True)

    jax.block_until_ready(jax.jit(jax.vmap(value))(jnp.array([1, 4, 8])))
    ((_, iterations),) = recorder.ended
    assert iterations == sum(max(i, 1) for i in range(8))
    assert recorder.lanes[0] == 2


# ---- where programs run


def mesh(devices):
    return jax.make_mesh((devices,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))


ROWS = PartitionSpec("devices")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(recorder, check_vma):
    f = jax.shard_map(powers(25, True), mesh=mesh(4), in_specs=ROWS, out_specs=ROWS, check_vma=check_vma)
    xs = jnp.linspace(0.1, 0.8, 4)
    values = jax.jit(f)(xs)
    np.testing.assert_array_equal(values, jax.jit(jax.vmap(powers(25, None)))(xs))
    assert sorted(recorder.ended) == [(number, 25) for number in (1, 2, 3, 4)]


def test_lengths_that_differ_between_devices(recorder):
    f = jax.shard_map(lambda n: summed(n[0], True)[None], mesh=mesh(4), in_specs=ROWS, out_specs=ROWS)
    jax.block_until_ready(jax.jit(f)(jnp.arange(4) * 9))
    assert sorted(end for _, end in recorder.ended) == [0, 9, 18, 27]


def test_arrays_that_are_sharded(recorder):
    x = jax.device_put(jnp.linspace(0.0, 1.0, 8), jax.NamedSharding(mesh(8), ROWS))
    run = jax.jit(lambda x: lx.fori_loop(0, 25, lambda i, c: jnp.sin(c) + x.sum(), x, progress=True))
    jax.block_until_ready(run(x))
    once(recorder, 25)


# ---- long loops


@pytest.mark.parametrize("reverse", [False, True])
def test_positions_beyond_what_can_be_counted(reverse):
    """After the last position that can be counted no report is due; before, none is due beyond it."""
    start = jnp.int32(5 if reverse else MOST_STEPS - 5)
    watch = Watch(None, start, None)  # type: ignore[arg-type]
    walk = RowLoop(reverse=reverse, limited=reverse, predicated=not reverse)
    for steps in (3, 100, MOST_STEPS):
        due = int(watch._after(walk, start, jnp.int32(steps)))
        expected = {3: 2 if reverse else MOST_STEPS - 2}.get(steps, -1)
        assert due == expected


def test_a_loop_that_counts_no_further_reports_no_more():
    """Started at a position near the largest, as after two thousand million steps."""
    found = Recorder()
    start = jnp.int32(MOST_STEPS - 25)

    def run(_):
        reports = Reports.begin(Reporting(found_reporter(found)), -1)
        watch = Watch(reports, start, None)
        walk = RowLoop(reverse=False, predicated=True, limited=False, watch=watch)
        steps = Steps(lambda _: lambda position, carry: ([carry[1] < 60, carry[1] + 1], []), [])
        state = LoopState([jnp.bool_(True), jnp.int32(0)], [], start, watch.first_due(walk))
        return walk.run(steps, state, jnp.int32(MOST_STEPS)).carry[1]

    assert jax.jit(run)(0) == 61
    assert found.steps == expected(25)


def found_reporter(recorder):
    class Direct:
        def begin(self, total, runs, lanes, size):
            return recorder.begin(None, "", 0.1, "text", total=total, parts=runs, lanes=lanes, size=size), 1

        def report(self, run, steps, active):
            return recorder.report(run, steps, active)

    return Direct()


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"label": 3}, TypeError, "label"),
        ({"every": "soon"}, TypeError, "every"),
        ({"every": True}, TypeError, "every"),
        ({"every": jnp.ones(())}, TypeError, "every"),
        ({"every": 0}, ValueError, "every"),
        ({"every": float("nan")}, ValueError, "every"),
        ({"every": float("inf")}, ValueError, "every"),
        ({"style": "banana"}, ValueError, "'auto', 'tqdm', 'text'"),
    ],
)
def test_bad_progress(arguments, error, words):
    with pytest.raises(error, match=words):
        lx.Progress(**arguments)


def test_tqdm_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(public, "has_tqdm", lambda: False)
    with pytest.raises(ImportError, match=r"pip install loopax\[progress\]"):
        lx.Progress(style="tqdm")


@pytest.mark.parametrize("wrong", ["yes", 1, lx.Progress])
def test_what_is_no_progress(wrong):
    with pytest.raises(TypeError, match=r"fori_loop\(progress=...\).*expected True, False, None"):
        summed(3, wrong)


def test_traced_progress():
    with pytest.raises(TypeError, match=r"progress=.*traced"):
        jax.jit(lambda flag: summed(3, flag))(True)


def test_progress_is_a_static_argument():
    assert hash(lx.Progress(every=1)) == hash(lx.Progress(every=1.0))
    assert lx.Progress() == lx.Progress(None, 0.1, "auto")


def test_loops_are_told_apart_by_what_they_repeat():
    first, second = (lambda c: c), (lambda c: c + 1)
    of = lambda function: public.Reporter.of(lx.Progress(), "scan", function)
    assert of(first) == of(partial(partial(first), 3)) == of(jax.jit(first))
    assert of(first) != of(second)
    assert of(first) != public.Reporter.of(lx.Progress("other"), "scan", first)


@pytest.mark.parametrize("lanes_map", [True, False])
def test_a_loop_that_is_taken_apart_cannot_show_progress(lanes_map):
    def run():
        if lanes_map:
            return lx.lanes_map(lambda n: summed(n, True), jnp.arange(3))
        return lx.fori_loop(0, 3, lambda i, x: x + summed(i, True), 0.0, lanes="free")

    with pytest.raises(NotImplementedError, match="progress="):
        run()
