"""Random programs give what unrolled Python loops give: 100 here, most of them slow; five thousand by `make fuzz`.

`LOOPAX_FUZZ` says how many, `LOOPAX_FUZZ_FIRST` the number of the first. What is wrong is printed as a `Program`:
`python -m tests.fuzz.smaller NUMBER` makes it smaller; keep it in `KEPT`. `python -m tests.fuzz` says how many programs
have which features.
"""

import os

import jax
import jax.numpy as jnp
import pytest

from tests.core.batching.counting import alone
from tests.fuzz.draw import program, watched
from tests.fuzz.evaluate import difference, problem
from tests.fuzz.nests import NUMBERS, W, X, nest
from tests.fuzz.program import Program
from tests.support.reference import assert_close
from tests.support.versions import maps_custom_vjp

PROGRAMS = int(os.environ.get("LOOPAX_FUZZ", "100"))
FIRST = int(os.environ.get("LOOPAX_FUZZ_FIRST", "0"))
IN_ONE_TEST = 10  # so that tests run in parallel

PARTS = range(FIRST, FIRST + PROGRAMS, IN_ONE_TEST)
SLOW = () if "LOOPAX_FUZZ" in os.environ else PARTS[1:]


@pytest.mark.parametrize("first", [pytest.param(i, marks=pytest.mark.slow) if i in SLOW else i for i in PARTS])
def test_random_programs(first):
    numbers = range(first, min(first + IN_ONE_TEST, FIRST + PROGRAMS))
    wrong = {number: found for number in numbers if (found := problem(program(number)))}
    assert not wrong, "\n".join(f"{number}: {program(number)}\n{wrong[number]}" for number in wrong)


@pytest.mark.parametrize("first", [pytest.param(i, marks=pytest.mark.slow) if i in SLOW else i for i in PARTS])
def test_random_programs_whose_steps_are_looked_at(first):
    numbers = range(first, min(first + IN_ONE_TEST, FIRST + PROGRAMS))
    wrong = {number: found for number in numbers if (found := problem(watched(number)))}
    assert not wrong, "\n".join(f"{number}: {watched(number)}\n{wrong[number]}" for number in wrong)


NESTS = range(FIRST, FIRST + (PROGRAMS if "LOOPAX_FUZZ" in os.environ else 12))


@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=pytest.mark.slow) if SLOW and i > FIRST + 1 else i for i in NESTS]
)
def test_random_nests_in_free_lanes(number):
    """Values, and the first derivatives in each order, are those of each lane alone."""
    program = nest(number)
    free, lanes = program("free"), (W, X, NUMBERS)
    wanted = alone(jax.value_and_grad(program("lockstep"), (0, 1)), *lanes)

    def total(w, x):
        values = jax.vmap(free)(w, x, NUMBERS)
        return values.sum(), values

    @jax.jit
    def found(w, x):
        (_, values), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(w, x)
        dots = jax.jvp(lambda *given: jax.vmap(free)(*given, NUMBERS), (w, x), (jnp.ones_like(w), jnp.ones_like(x)))[1]
        return (values, gradients), jax.vmap(jax.value_and_grad(free, (0, 1)))(w, x, NUMBERS), dots

    of_batch, each, dots = found(W, X)
    assert_close(jax.jit(jax.vmap(free))(*lanes), wanted[0])
    assert_close(of_batch, wanted)
    assert_close(each, wanted)
    assert_close(dots, wanted[1][0] + wanted[1][1].sum(-1))


# Programs that were wrong once, each as small as it is still wrong.
KEPT = [
    # Reverse mode of lanes in stages, whose body calls a `jax.custom_vjp`.
    Program(
        "while",
        ("custom_vjp", "switch"),
        steps=4,
        stop=True,
        lanes="compact",
        transformations=("vmap of t", "jacrev"),
        seed=1,
    ),
    Program(
        "while", ("custom_vjp",), stop=True, lanes="compact", transformations=("vmap", "checkpoint", "grad"), seed=1
    ),
    # In `jax.checkpoint`: ys without rows depend on nothing.
    Program(
        "scan",
        ("sort",),
        stop=True,
        max_steps=0,
        lanes="compact",
        transformations=("checkpoint", "vmap of n", "jacrev"),
        seed=416,
    ),
    # Reverse mode twice, without a bound: the branches of a `cond` share residuals.
    Program("while", ("cond",), steps=3, kind="two slots", transformations=("grad", "grad"), seed=150),
    # Lanes of 64 bits in 32-bit mode are gathered.
    Program(
        "while", ("doubles_in_inner_loop",), "d", steps=2, lanes="compact", transformations=("vmap", "grad"), seed=783
    ),
    # A batch of batches whose lanes start at rows of their own, with rows in host memory.
    Program(
        "scan",
        ("row_from_host",),
        "p",
        reverse=True,
        stop=True,
        max_steps=2,
        transformations=("vmap of n", "vmap of n"),
        seed=622,
    ),
    # An inner loop with compact lanes in `jax.checkpoint`: its results seemed to depend on tangents.
    Program(
        "scan",
        ("loop_in_loop",),
        steps=3,
        lanes="compact",
        policy="everything again",
        rewritten=True,
        transformations=("vmap of t", "vjp"),
        seed=155,
    ),
]


def expected(program):
    mapped = "custom_vjp" in program.body and program.lanes == "compact"
    return pytest.param(program, marks=[maps_custom_vjp] if mapped else [])


@pytest.mark.parametrize("program", list(map(expected, KEPT)), ids=str)
def test_programs_that_were_wrong(program):
    assert difference(program) is None
