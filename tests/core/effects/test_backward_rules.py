"""Effects in the backward rule of a `jax.custom_vjp`: once for each step back, whatever is recomputed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import loopax as lx
from tests.core.effects.log import EFFECTS, Log
from tests.support.problem import KINDS, name_of
from tests.support.slow import each_kind

CHECKPOINTED, SLOTS, BOUNDED, RESIDUALS = KINDS
REVERSIBLE = lx.Reversible(lambda i, x: x / 2.0)


def marked(effect, reads="cotangent"):
    """The identity, with an effect on the way back."""
    identity = jax.custom_vjp(lambda x: x)

    def back(x, cotangent):
        effect(cotangent if reads == "cotangent" else x)
        return (cotangent,)

    identity.defvjp(lambda x: (x, x), back)
    return identity


def doubled(effect, reads="cotangent", **options):
    """`(x, n) -> 2**n x`, with an effect in each step back."""
    step = marked(effect, reads)
    return lambda x, n: lx.fori_loop(0, n, lambda i, x: step(x) * 2.0, x, **options)


def called(reads, x, n):
    """What the steps of a lane read on the way back, in their order."""
    return [2.0**i for i in range(1, n + 1)] if reads == "cotangent" else [x * 2.0**i for i in reversed(range(n))]


OPTIONS = {
    **{name_of(kind): {"max_steps": 9, "kind": kind} for kind in (*KINDS, REVERSIBLE)},
    "without a bound": {},
    "slots without a bound": {"kind": SLOTS},
}
FAST = ("Checkpointed", "Residuals", "without a bound")
READS = ("cotangent", "carry")
# Each effect reads either; how steps are stored meets an effect with an order and one without.
CASES = [("Checkpointed", effect, reads) for effect in EFFECTS for reads in READS]
CASES += [
    pytest.param(name, effect, reads, marks=() if name in FAST else pytest.mark.slow)
    for name in OPTIONS
    for effect, reads in zip(("callback", "ordered io_callback"), READS, strict=True)
    if name != "Checkpointed"
]


@pytest.mark.parametrize(("options", "effect", "reads"), CASES)
def test_once_for_each_step_back(options, effect, reads):
    log = Log()
    f = doubled(lambda x: EFFECTS[effect](log, x), reads, **OPTIONS[options])
    gradient = jax.jit(jax.grad(f))
    order = list if "ordered" in effect else sorted
    assert order(log.in_order(gradient, 3.0, 5)) == order(called(reads, 3.0, 5))
    assert gradient(3.0, 5) == 32.0


@pytest.mark.parametrize("reads", ["cotangent", "carry"])
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_with_a_gradient_for_each_lane(kind, reads):
    """Not for finished lanes."""
    log = Log()
    f = doubled(log, reads, max_steps=9, kind=kind)
    starts, counts = np.array([1.0, 10.0, 20.0]), np.array([2, 3, 0])
    expected = sorted(called(reads, 1.0, 2) + called(reads, 10.0, 3))
    assert log.of(jax.jit(jax.vmap(jax.grad(f))), starts, counts) == expected


@pytest.mark.parametrize("lanes", ["lockstep", "compact", "sequential"])
@pytest.mark.parametrize("kind", each_kind(CHECKPOINTED), ids=name_of)
def test_once_where_cotangents_alone_are_batched(kind, lanes):
    """What a rule reads of the step is the same for all cotangents."""
    step = lambda log: marked(lambda x: log(x.sum()), "carry")
    loop = lambda log: lambda x: lx.fori_loop(0, 2, lambda i, x: step(log)(x) * 2.0, x, kind=kind, lanes=lanes)
    log, x = Log(), np.array([1.0, 3.0])
    assert log.of(jax.jit(jax.jacrev(loop(log))), x) == [4.0, 8.0]


@pytest.mark.parametrize("effect", ["ordered callback", "io_callback"])
@pytest.mark.parametrize("kind", each_kind(SLOTS), ids=name_of)
def test_a_gradient_inside_of_a_loop_or_a_checkpoint(kind, effect):
    """The effects of a sweep are those of what it stands in."""
    log = Log()
    f = doubled(lambda x: EFFECTS[effect](log, x), max_steps=4, kind=kind)
    nested = lambda x, n: lx.fori_loop(0, n, lambda i, x: x + jax.grad(f)(x, 2), x, max_steps=3)
    assert log.of(jax.jit(nested), 3.0, 2) == [2.0, 2.0, 4.0, 4.0]
    assert log.of(jax.jit(jax.vmap(nested)), np.array([3.0, 1.0]), np.array([0, 1])) == [2.0, 4.0]
    assert log.of(jax.jit(jax.grad(jax.checkpoint(lambda x: f(x, 2)))), 3.0) == [2.0, 4.0]
    unused = jax.jit(lambda x: (jax.grad(f)(x, 2), x)[1])
    assert log.of(unused, 3.0) == [2.0, 4.0]


@pytest.mark.parametrize("kind", each_kind(SLOTS, RESIDUALS), ids=name_of)
def test_second_derivatives(kind):
    """A callback happens once. What a derivative may neither repeat nor drop is refused."""
    log = Log()
    f = doubled(log, max_steps=9, kind=kind)
    squared = lambda f: lambda x: jax.grad(f)(x, 3) * x
    assert log.of(jax.jit(jax.grad(squared(f))), 3.0) == [2.0, 4.0, 8.0]
    assert log.of(jax.jit(lambda x: jax.jvp(squared(f), (x,), (x,))), 3.0) == [2.0, 4.0, 8.0]
    for effect in ("ordered callback", "io_callback"):
        f = doubled(lambda x, effect=effect: EFFECTS[effect](log, x), max_steps=9, kind=kind)
        with pytest.raises(NotImplementedError, match="a loop is differentiated whose body has effects"):
            jax.grad(squared(f))(3.0)
        with pytest.raises(NotImplementedError, match="a loop is differentiated whose body has effects"):
            jax.jvp(squared(f), (3.0,), (1.0,))


def _long(x, times):
    for _ in range(times):
        x = jnp.sin(x) + x
    return x


LONG_STEPS = {
    "replayed in one loop": lambda x: _long(x, 160),
    "held once": lambda x: lx.fori_loop(0, 2, lambda i, x: _long(x, 60), x),
}


@pytest.mark.parametrize("step", LONG_STEPS)
def test_in_long_steps(step):
    """Steps that a program holds once for all that is evaluated again."""
    log = Log()
    identity = marked(log)
    body = lambda i, x: identity(x + 0.0 * LONG_STEPS[step](x)) * 2.0
    f = lambda x: lx.fori_loop(0, 5, body, x, kind=lx.Checkpointed(2))
    assert log.of(jax.jit(jax.grad(f)), 1.0) == [2.0, 4.0, 8.0, 16.0, 32.0]
