"""`Auto`: what it takes, that it fits, and the reason that it keeps."""

import jax
import jax.numpy as jnp
import pytest

import loopax as lx
from loopax._src.core import Checkpoints, EveryCarry, EveryResidual
from loopax._src.core.ir.kind import LoopFacts, ResidualFacts, StepFacts
from loopax._src.core.jaxpr.cost import arithmetic, evaluation
from loopax._src.jax_internals import one_function as one_function_of_cpu
from loopax._src.settings import H100, calibration, costs
from tests.core.lowering.test_memory import STATE, WEIGHTS, temporary

STEPS = 400


def plans(jaxpr):
    """What the loops of a program store."""
    for eqn in jaxpr.eqns:
        if "plan" in eqn.params:
            yield eqn.params["plan"]
        elif "kind" in eqn.params:
            yield getattr(eqn.params["kind"], "decided", eqn.params["kind"])
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from plans(inner)


def chosen(function, *args):
    """The one way in which all loops of a program store."""
    found = set(plans(jax.make_jaxpr(function)(*args).jaxpr))
    assert len(found) == 1
    return found.pop()


def loop(step, kind, **options):
    return lambda h, n: lx.fori_loop(0, n, lambda i, h: step(h), h, kind=kind, **options).sum()


def fixed(step, kind: lx.Kind = lx.Auto()):  # noqa: B008 - kinds are immutable
    return lambda h: loop(step, kind)(h, STEPS)


linear = lambda h: 0.9 * h
layer = lambda h: jnp.tanh(WEIGHTS @ h)
one_function = lambda h: jnp.tanh(1.1 * h)
many_functions = lambda h: jnp.sin(jnp.exp(-(jnp.cos(h) ** 2))) * jnp.tanh(h)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (linear, EveryResidual),  # nothing is needed of any step
        (layer, EveryResidual),  # one value for each of the state, against a matrix product
        (many_functions, EveryResidual),  # several values for each of the state, which all fit in a near cache
    ],
)
def test_the_fastest_kind(step, expected):
    assert isinstance(chosen(jax.grad(fixed(step)), STATE), expected)


def test_values_that_fit_in_no_cache_are_computed_again():
    assert isinstance(chosen(jax.grad(fixed(many_functions)), jnp.ones(8192)), EveryCarry)


@pytest.mark.parametrize(
    ("step", "carries"),
    [*((one_function, c) for c in (1, 7, 60, 500)), *((many_functions, c) for c in (2, 30, 300, 10_000))],
    ids=["one-1", "one-7", "one-60", "one-500", "many-2", "many-30", "many-300", "many-10000"],
)
def test_it_fits(step, carries):
    """Beside the working copies of a carry, of which there are a few."""
    memory = carries * STATE.nbytes
    needed = temporary(jax.grad(fixed(step, lx.Auto(memory=memory))), STATE)
    assert needed <= memory + 12 * STATE.nbytes


def test_as_many_checkpoints_as_fit():
    assert chosen(jax.grad(fixed(many_functions, lx.Auto(memory=10 * STATE.nbytes + 1))), STATE).checkpoints == 10


def test_residuals_are_measured_only_where_they_could_be_stored():
    """Not without a bound: to measure them, the derivative of the body is evaluated partially, which takes long."""

    def measured(_) -> ResidualFacts:
        raise AssertionError

    facts = LoopFacts(None, False, False, False, True, 1.0, False, lambda _: StepFacts(8, 10.0), measured)
    assert isinstance(lx.Auto().plan(facts), Checkpoints)


@pytest.mark.parametrize(("carries", "slots"), [(3, 3), (64, 64), (1000, 64)])
def test_without_a_bound(carries, slots):
    kind = lx.Auto(memory=carries * STATE.nbytes)
    assert chosen(jax.grad(loop(layer, kind)), STATE, 3).checkpoints == slots


def test_a_bound_that_is_a_precaution_gets_an_eighth_of_the_memory():
    memory = 1600 * STATE.nbytes
    for share, kind in [(4, Checkpoints), (16, EveryCarry)]:
        costly = lambda h: many_functions(many_functions(h))
        gradient = jax.grad(loop(costly, lx.Auto(memory=memory), max_steps=1600 // share * 2))
        assert isinstance(chosen(gradient, STATE, 3), kind)


def test_lanes_outside_of_the_loop_count_and_outside_of_the_gradient_do_not():
    lanes = jnp.ones((8, *STATE.shape))

    def per_lane(**given):
        kind = lx.Auto(memory=16 * STEPS * STATE.nbytes, **given)
        return lambda h: loop(layer, kind, max_steps=STEPS)(h, jnp.int32(3))

    assert isinstance(chosen(jax.vmap(jax.grad(per_lane())), lanes), EveryResidual)
    assert isinstance(chosen(jax.grad(lambda lanes: jax.vmap(per_lane())(lanes).sum()), lanes), Checkpoints)
    assert isinstance(chosen(jax.vmap(jax.grad(per_lane(num_lanes=8))), lanes), Checkpoints)


@pytest.mark.parametrize("lanes", ["lockstep", "compact"])
def test_lanes_to_come_are_priced(lanes):
    """A gradient of one lane is alone, or of 64 lanes where the loop says how lanes run, or of so many."""
    gradient = lambda kind: jax.grad(
        lambda h: loop(many_functions, kind, max_steps=STEPS, lanes=lanes)(h, jnp.int32(3))
    )
    said = lambda kind: chosen(gradient(kind), STATE).reason
    assert ("64 lanes" in said(lx.Auto())) == (lanes == "compact")
    assert "of each of 500 lanes" in said(lx.Auto(num_lanes=500))
    assert isinstance(chosen(gradient(lx.Auto(num_lanes=500)), STATE), Checkpoints)


def test_lanes_that_run_one_after_another_all_store():
    """What fits in a near cache for one of them does not for all, and a step takes as long as that of one."""
    of_lanes = lambda lanes: loop(many_functions, lx.Auto(), max_steps=STEPS, lanes=lanes)
    plan = lambda lanes: chosen(jax.grad(lambda h: of_lanes(lanes)(h, jnp.int32(3))), STATE)
    assert not isinstance(plan("lockstep"), Checkpoints)
    assert isinstance(plan("sequential"), Checkpoints)
    assert "lanes" not in plan("sequential").reason


def test_the_smaller_of_kinds_that_take_as_long():
    """Their times differ by half a per cent."""
    step, rows = StepFacts(8, 1000.0, 0.0, 2000.0), ResidualFacts(4, 1990.0)
    facts = LoopFacts(100, False, False, False, True, 1.0, False, lambda _: step, lambda _: rows)
    assert isinstance(lx.Auto().plan(facts), EveryResidual)
    facts = LoopFacts(100, False, False, False, True, 1.0, False, lambda _: step, lambda _: ResidualFacts(16, 1990.0))
    assert isinstance(lx.Auto().plan(facts), EveryCarry)


def test_num_lanes_is_a_positive_int():
    assert repr(lx.Auto(num_lanes=3)) == "Auto(num_lanes=3)"
    with pytest.raises(ValueError, match=r"num_lanes"):
        lx.Auto(num_lanes=0)
    with pytest.raises(TypeError, match=r"num_lanes"):
        lx.Auto(num_lanes=2.0)  # type: ignore


def test_only_what_the_derivative_needs_counts():
    """A counter and weights in the carry, and a state of which nothing is needed, are not stored."""

    def body(i, carry):
        weights, count, h, unused = carry
        return weights, count + 1, jnp.tanh(weights @ h), unused * 2

    def energy(h):
        init = (WEIGHTS, 0, h, jnp.ones(10_000))
        return lx.fori_loop(0, STEPS, body, init, kind=lx.Auto(memory=STATE.nbytes))[2].sum()

    assert chosen(jax.grad(energy), STATE).checkpoints == 1


def test_the_reason_is_kept():
    reason = chosen(jax.grad(fixed(many_functions)), STATE).reason
    assert reason.startswith(
        f"at most {256 * 2**20} bytes for {STEPS} steps; expected nanoseconds for a step: Residuals "
    )
    assert ", Bounded " in reason
    assert ", Checkpointed " in reason
    reason = chosen(jax.grad(fixed(many_functions, lx.Auto(memory=5000))), STATE).reason
    assert reason.startswith("9 carries of 512 bytes, at most 5000 bytes")


def cost(function, *args):
    return arithmetic(jax.make_jaxpr(function)(*args))


def test_costs_of_steps():
    assert cost(lambda h: WEIGHTS @ h, STATE) == pytest.approx(costs().product * 2 * 64 * 64)
    assert cost(lambda h: h + h, STATE) == pytest.approx(costs().elementwise * 64)
    assert cost(jnp.exp, STATE) == pytest.approx(costs().function * 64)
    assert cost(jnp.sin, STATE) == pytest.approx(costs().slow_function * 64)
    image, kernel = jnp.ones((1, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
    convolution = lambda image: jax.lax.conv(image, kernel, (1, 1), "SAME")
    assert cost(convolution, image) == pytest.approx(costs().convolution * 2 * (4 * 8 * 8) * (3 * 3 * 3))


@pytest.mark.parametrize(
    "operation",
    [
        lambda h: jnp.stack([h, h]),
        lambda h: jnp.concatenate([h, h]),
        lambda h: h.at[3].multiply(2.0),
        lambda h: jax.lax.top_k(h, 2),
    ],
    ids=["stack", "concatenate", "scatter", "top_k"],
)
def test_operations_that_are_not_fused_cost_a_call(operation):
    assert (
        evaluation(jax.make_jaxpr(operation)(STATE)) >= costs().call > evaluation(jax.make_jaxpr(jnp.negative)(STATE))
    )


def test_costs_of_loops_in_steps():
    one = cost(jnp.sin, STATE)
    assert cost(lambda h: jax.lax.scan(lambda h, _: (jnp.sin(h), None), h, None, 5)[0], STATE) == pytest.approx(5 * one)
    assert cost(jax.jit(jnp.sin), STATE) == pytest.approx(one)
    branches = lambda h: jax.lax.cond(True, jnp.sin, lambda h: h, h)
    assert one <= cost(branches, STATE) <= one + 1
    inner = lambda h: lx.fori_loop(0, 7, lambda i, h: jnp.sin(h), h)
    assert 7 * one <= cost(inner, STATE) <= 7 * (one + 2)
    # A condition may end it long before its bound, which is a precaution.
    inner = lambda h: lx.while_loop(lambda h: h.sum() > 1, jnp.sin, h, max_steps=10_000)
    assert 10 * one <= cost(inner, STATE) <= 10 * (one + 64)


class Told(lx.Kind):
    """A kind that keeps the facts of the loops that ask it."""

    def __init__(self):
        self.facts = []

    def plan(self, loop):
        self.facts.append(loop)
        return lx.Bounded().plan(loop)


@pytest.mark.parametrize("kind", ["bounded", "residuals"])
def test_a_loop_in_a_step_runs_again_before_its_derivative(kind):
    """From a carry: forward, and its own derivative, which evaluates its steps again if it has stored carries."""
    told = Told()
    step = lambda h: lx.fori_loop(0, 50, lambda _, h: many_functions(h), h, kind=kind)
    jax.make_jaxpr(jax.grad(fixed(step, told)))(STATE)
    (facts,) = told.facts
    again = facts.step.derivative - facts.residuals.derivative
    assert facts.step.evaluation <= again * 1.1
    assert (facts.residuals.derivative > facts.step.evaluation) == (kind == "bounded")


@pytest.mark.skipif(not one_function_of_cpu.MAKES_FUNCTIONS, reason="XLA makes no functions of loops here")
def test_an_operation_in_a_function_takes_some_time_on_few_numbers():
    """Else a thousand steps of one number would look free, and rows of them a reason to compute again."""

    def evaluation(size, length):
        told = Told()

        def step(h):
            for _ in range(length):
                h = h * h - 0.5
            return h

        jax.make_jaxpr(jax.grad(fixed(step, told)))(jnp.ones(size, jnp.float32))
        return told.facts[0].step.evaluation

    assert evaluation(1, 20) - evaluation(1, 10) >= 10
    assert evaluation(1000, 20) - evaluation(1000, 10) > 10 * (evaluation(1, 20) - evaluation(1, 10))


@pytest.mark.skipif(not one_function_of_cpu.MAKES_FUNCTIONS, reason="XLA makes no functions of loops here")
def test_where_the_choice_matters_in_a_large_batch_alone():
    """A loop of microseconds, whichever kind it takes, until a map around the gradient multiplies what is stored."""
    tiny = lambda _, h: 3.5 * h * (1 - h)

    def plan(kind, steps=1000):
        return chosen(jax.grad(lambda x: lx.fori_loop(0, steps, tiny, x, kind=kind)), jnp.float32(0.3))

    assert isinstance(plan(lx.Auto()), Checkpoints)
    assert "of 1024 lanes: Residuals" in plan(lx.Auto()).reason
    assert isinstance(plan(lx.Auto(num_lanes=1)), EveryResidual)
    assert "1024" not in plan(lx.Auto(num_lanes=1)).reason
    assert isinstance(plan(lx.Auto(), 100_000), EveryResidual)  # some of these kinds take 100 microseconds more


@pytest.mark.skipif(not one_function_of_cpu.MAKES_FUNCTIONS, reason="XLA makes no functions of loops here")
def test_a_loop_with_a_loose_bound_may_be_one_of_a_batch():
    """All rows up to the bound are set to zero: of many lanes, this takes longer than the steps that they take."""

    def lorenz(y):
        return jnp.stack([10.0 * (y[1] - y[0]), y[0] * (28.0 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]])

    def step(y):
        middle = y + 0.005 * lorenz(y)
        return y + 0.01 * lorenz(y + 0.005 * lorenz(middle))

    def plan(kind, n, **options):
        gradient = jax.grad(loop(step, kind, **options))
        return chosen(*((lambda h: gradient(h, n), jnp.ones(3)) if isinstance(n, int) else (gradient, jnp.ones(3), n)))

    loose = plan(lx.Auto(), jnp.int32(20_000), max_steps=20_000)
    assert isinstance(loose, EveryCarry)
    assert "in a batch of 64, if it is one: Residuals" in loose.reason
    batched = loop(step, lx.Auto(), max_steps=20_000)
    for length in (jnp.int32(20_000), jnp.full(2, 20_000)):  # the same in all lanes, or each has its own
        lanes = jax.vmap(batched, (0, 0 if length.ndim else None))
        inside = chosen(jax.grad(lambda h, n, f=lanes: f(h, n).sum()), jnp.ones((2, 3)), length)
        assert "if it is one" not in inside.reason
    for alone in (plan(lx.Auto(num_lanes=1), jnp.int32(20_000), max_steps=20_000), plan(lx.Auto(), 20_000)):
        assert isinstance(alone, EveryResidual)
        assert "64" not in alone.reason


def test_a_gpu_asks_the_host_where_the_length_is_not_known():
    """In each step: of loops whose length is a value, and of slots. It knows blocks that are not even, too."""

    def facts(length):
        told = Told()
        jax.make_jaxpr(jax.grad(loop(layer, told, max_steps=500)))(STATE, length)
        return told.facts.pop()

    def of_static(length):
        told = Told()
        jax.make_jaxpr(jax.grad(lambda h: loop(layer, told)(h, length)))(STATE)
        return told.facts.pop()

    with lx.configure(calibration="h100"):
        look = calibration().look
        static, dynamic = of_static(400), facts(jnp.int32(400))
        assert dynamic.step.overhead == pytest.approx(static.step.overhead + look)
        assert dynamic.residuals.derivative == pytest.approx(static.residuals.derivative + look)
        even, uneven = (lx.Checkpointed().cost(of_static(length)) for length in (400, 401))
        assert uneven.time == pytest.approx(even.time, rel=1e-3)
        slots = lx.Checkpointed(10).cost(of_static(400))
        assert slots.time > even.time + 2.9 * look
    assert facts(jnp.int32(400)).step.overhead == of_static(400).step.overhead  # a CPU asks nobody


def test_each_array_that_is_stored_costs_a_kernel_of_a_gpu():
    """So `Auto` evaluates a step again that has many residuals and that XLA makes one kernel of."""

    def leapfrog(i, state):
        q, p = state
        for _ in range(5):
            p = p - 0.1 * jnp.sin(q) * jnp.cos(q)
            q = q + 0.1 * jnp.tanh(p)
        return q, p

    def plan(calibration):
        told = Told()
        start = jnp.ones(100), jnp.ones(100)
        with lx.configure(calibration=calibration):
            jax.make_jaxpr(jax.grad(lambda s: lx.fori_loop(0, 200, leapfrog, s, kind=told)[0].sum()))(start)
            facts = told.facts.pop()
            return lx.Auto().plan(facts), facts.residuals.derivative, facts.step.derivative

    of_gpu, residuals, carry = plan("h100")
    assert isinstance(of_gpu, EveryCarry)
    assert residuals - carry > 5 * H100.stored
    assert plan("cpu")[1] < residuals
