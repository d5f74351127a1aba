"""What `explain` says of the loops in a function, from its trace; each warning, with a reason for it and without."""

import re
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array, lax
from jax.sharding import AxisType, PartitionSpec

import loopax as lx
from benchmarks.counter import Counter
from loopax import schedule
from loopax.insight import LoopExplanation
from tests.support.problem import argument_of


def only(found: lx.Explanation) -> LoopExplanation:
    (loop,) = found.walk()
    return loop


def in_one_line(found: lx.Explanation) -> str:
    """Its text, wherever lines break."""
    return " ".join(str(found).split())


def roles(loop: LoopExplanation) -> dict[str, str]:
    return {leaf.name: leaf.role for leaf in loop.leaves}


def recurrent(params, xs, n, **options):
    def step(c, x):
        h = jnp.tanh(c["h"] @ c["w"] + x)
        return {"h": h, "w": c["w"], "count": c["count"] + 1}, h.sum()

    start = {"h": xs[0], "w": params["w"], "count": 0}
    last, ys = lx.scan(step, start, xs, n, **options)
    return (last["h"] ** 2).sum() * last["count"] + ys.sum()


ARGS = {"w": jnp.ones((4, 4))}, jnp.ones((100, 4)), jnp.int32(70)


def test_the_arrays_of_a_loop_and_where_it_stands():
    loop = only(lx.explain(recurrent, *ARGS, argnums=0))
    assert roles(loop) == {
        "carry['h']": "carried",
        "carry['count']": "carried",
        "xs": "stream",
        "ys": "stream",
        "carry['w']": "constant",
    }
    leaves = {leaf.name: leaf for leaf in loop.leaves}
    assert (leaves["xs"].shape, leaves["xs"].dtype, leaves["xs"].size) == ((100, 4), jnp.float64, 3200)
    assert (leaves["ys"].shape, leaves["carry['h']"].shape, leaves["carry['h']"].size) == ((100,), (4,), 32)
    assert {name for name, leaf in leaves.items() if leaf.is_stored} <= {"carry['h']", "carry['count']"}
    assert {name for name, leaf in leaves.items() if leaf.is_differentiated} == {"carry['h']", "carry['w']"}
    assert (loop.function, loop.kind, loop.lanes) == ("loopax.scan", lx.Auto(), lx.Lockstep())
    assert (loop.most_steps, loop.is_fixed) == (100, False)
    with open(__file__) as file:
        line = 1 + next(i for i, text in enumerate(file) if "lx.scan(step, start, xs" in text)
    assert loop.source == f"tests/insight/test_explain.py:{line} (recurrent)"


def test_why_auto_chooses():
    stored = only(lx.explain(recurrent, *ARGS)).stored
    assert stored is not None
    _, listed = stored.reason.split("expected nanoseconds for a step: ")
    costs = {name: float(cost) for name, cost in re.findall(r"(\w+) ([\d.]+)(?:,|$)", listed)}
    assert costs.keys() == {"Residuals", "Bounded", "Checkpointed"}
    assert stored.kind == f"{min(costs, key=costs.__getitem__)}()"
    stored = only(lx.explain(partial(recurrent, kind=lx.Auto(memory=100)), *ARGS)).stored
    assert stored is not None
    assert stored.kind.startswith("Checkpointed(")
    assert (stored.carries * stored.size <= 100, stored.carries > 0) == (True, True)


@pytest.mark.parametrize("kind", [lx.Checkpointed(), lx.Checkpointed(5), lx.Bounded(), lx.Residuals()], ids=repr)
def test_evaluations_are_those_that_are_made(kind):
    counter, x = Counter(), jnp.float64(0.5)
    for steps in (2, 37):
        program = lambda x, steps=steps: lx.fori_loop(0, steps, lambda i, x: 0.9 * counter(x), x, kind=kind)
        stored = only(lx.explain(program, x)).stored
        assert stored is not None
        assert counter.of(jax.jit(jax.grad(program)), x) == stored.evaluations


@pytest.mark.parametrize(("checkpoints", "steps"), [(1, 2), (5, 20), (10, 65), (64, 2144)])
def test_steps_up_to_which_none_is_evaluated_more_than_three_times(checkpoints, steps):
    """Without a bound: by the number of checkpoints. The schedule does what the text says."""
    program = lambda x: lx.while_loop(lambda x: x < 9.0, jnp.exp, x, kind=lx.Checkpointed(checkpoints))
    assert f"3n up to {steps} steps" in " ".join(str(lx.explain(program, jnp.float64(0.5))).split())
    for n in (1, steps // 2, steps):
        assert schedule.picture(n, checkpoints, length_known=False).evaluations <= 3 * n


def test_stored_carries():
    """A state of a KiB; where nothing is said, about 2 sqrt(1000) of them, for even blocks."""
    for kind, carries in ((lx.Checkpointed(7), 7), (lx.Bounded(), 1000), (lx.Checkpointed(), 40 + 25)):
        program = lambda x, kind=kind: lx.fori_loop(0, 1000, lambda i, x: jnp.sin(x), x, kind=kind).sum()
        loop = only(lx.explain(program, jnp.ones(128)))
        assert loop.stored is not None
        assert loop.stored.size == 1024
        assert abs(loop.stored.carries - carries) <= 1
        assert loop.stored_bytes == 1024 * loop.stored.carries


def test_loops_are_found_wherever_they_stand():
    """What stands in another loop is indented."""

    @jax.custom_jvp
    def custom(x):
        return lx.fori_loop(0, 2, lambda i, x: x + 1, x)

    custom.defjvp(lambda p, t: (custom(*p), t[0]))
    sines = lambda n: lambda x: lx.fori_loop(0, n, lambda i, x: jnp.sin(x), x)

    def program(x):
        x = lax.cond(x > 0, sines(3), lambda x: x, jax.checkpoint(sines(4))(jax.jit(sines(5))(x)))
        return custom(jax.vmap(sines(6))(x[None])[0])

    assert sorted(loop.most_steps or 0 for loop in lx.explain(program, 1.0).loops) == [2, 3, 4, 5, 6]
    inner = lambda i, x: sines(i)(x)
    found = lx.explain(lambda x: lax.fori_loop(0, 3, lambda i, x: lx.fori_loop(0, 5, inner, x), x), 1.0)
    assert [loop.function for loop in found.walk()] == ["lax.scan", "loopax.fori_loop", "loopax.fori_loop"]
    assert found.loops[0].inner[0].inner[0].most_steps is None
    lines = str(found).splitlines()
    assert [len(line) - len(line.lstrip()) for line in lines if "_loop at" in line or "scan at" in line] == [0, 4, 8]


def test_loops_of_jax():
    def program(w, xs):
        h, _ = lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), xs[0], xs)
        return lax.while_loop(lambda h: h.sum() > 1, lambda h: h / 2, h).sum()

    scan, loop = lx.explain(program, jnp.ones((4, 4)), jnp.ones((9, 4))).loops
    assert (scan.function, scan.kind, scan.most_steps, scan.is_fixed) == ("lax.scan", None, 9, True)
    assert roles(scan) == {"h": "carried", "x": "stream", "w": "constant"}
    assert scan.stored is not None
    assert (scan.stored.kind, scan.stored.evaluations) == ("Residuals()", 9)
    assert (loop.function, loop.most_steps, loop.stored) == ("lax.while_loop", None, None)
    assert "has no reverse mode" in loop.problem
    assert "\nno gradient: Reverse-mode" in str(lx.explain(program, jnp.ones((4, 4)), jnp.ones((9, 4))))


def test_lanes():
    one = lambda x: lx.while_loop(lambda x: x < 10, lambda x: x * 1.5, x)
    mapped = only(lx.explain(jax.vmap(one), jnp.ones(50)))
    assert mapped.waiting == 50
    assert [(leaf.name, leaf.shape) for leaf in mapped.leaves] == [("carry", (50,))]
    same = only(lx.explain(jax.vmap(lambda x: lx.fori_loop(0, 5, lambda i, x: jnp.sin(x), x)), jnp.ones(50)))
    assert same.waiting == 1
    compact = lambda x: lx.while_loop(lambda x: x < 10, lambda x: x * jnp.sin(x), x, lanes="compact")
    packed = only(lx.explain(jax.vmap(compact), jnp.ones(300)))
    assert (packed.waiting, packed.lanes) == (1, lx.Compact())
    assert packed.stored is not None
    assert packed.stored_bytes == 300 * packed.stored.carries * packed.stored.size > 0


WEIGHTS, STARTS, COUNTS = jnp.ones((4, 4)), jnp.ones((64, 4)), jnp.arange(64)


def of_lanes(lanes: Any, kind: Any = "auto", steps: int = 40) -> Any:
    one = lambda w, x, n: lx.fori_loop(0, n, lambda i, x: jnp.tanh(w @ x), x, max_steps=steps, lanes=lanes, kind=kind)
    return lx.explain(lambda w: jax.vmap(lambda x, n: one(w, x, n).sum())(STARTS, COUNTS).sum(), WEIGHTS)


def test_what_lanes_store_is_multiplied_by_them():
    """And a choice for one of many says so."""
    found = of_lanes("compact", "bounded")
    assert only(found).stored_bytes == 40 * 32 * 64
    assert "gradient stores 40 carries x 32 B x 64 lanes = 80 KiB" in str(found)
    words = "gradient stores 40 carries x 2 KiB = 80 KiB, 1.25 KiB for each lane"
    assert words in in_one_line(of_lanes("lockstep", "bounded"))
    words = "takes Residuals() (for all 64 lanes together: at most 268435456 bytes"
    assert words in in_one_line(of_lanes("lockstep"))
    words = "takes Residuals() (for one of 64 lanes: at most 4194304 bytes for 40 steps of each of 32 lanes"
    assert words in in_one_line(of_lanes("compact"))
    found = of_lanes("compact", lx.Auto(memory=80 * 1024 // 2))  # of all lanes, half of their carries
    assert "takes Checkpointed" in str(found)
    assert only(found).stored_bytes <= 40 * 1024


def test_a_way_that_is_twice_as_good_is_named():
    found = only(of_lanes("lockstep"))
    assert found.lanes_expected["Lockstep()"] > 2 * found.lanes_expected["Sequential()"]
    (advice,) = found.warnings
    assert '`lanes="sequential"` is expected to take' in advice.message
    cheap = lambda x: lx.while_loop(lambda x: x < 9, lambda x: x + 1, x)
    (advice,) = only(lx.explain(jax.vmap(cheap), jnp.ones(64))).warnings
    assert "is expected to take" not in advice.message


def test_the_choice_of_lanes_is_said():
    inverted = lambda x: jnp.linalg.inv(x) + 1
    cheap = lambda x: lx.while_loop(lambda x: x < 9, lambda x: x + 1, x, lanes="auto")
    costly = lambda x: lx.while_loop(lambda x: x.sum() < 9, inverted, x * jnp.eye(30), lanes="auto")
    for function, taken in ((cheap, lx.Lockstep()), (costly, lx.Sequential())):
        found = lx.explain(jax.vmap(function), jnp.ones(64))
        (loop,) = (loop for loop in found.walk() if loop.lanes == lx.AutoLanes())
        assert loop.lanes_taken == taken
        assert f"AutoLanes(), which takes {taken!r} (expected nanoseconds" in " ".join(str(found).split())
        assert min(loop.lanes_expected, key=lambda way: loop.lanes_expected[way]) == repr(taken)


def test_blocks_of_free_lanes():
    """With their costs, and whether lanes wait there: a dear outer step, two loops one after another."""

    def f(x, n):
        def step(x, k):
            x = lx.fori_loop(0, k, lambda _, x: jnp.sin(x), jnp.sin(jnp.sin(x)))
            return lx.while_loop(lambda x: x.sum() > 9.0, jnp.cos, x), None

        return lx.scan(step, x, n, lanes="free")[0]

    found = lx.explain(jax.vmap(f), jnp.ones((6, 64)), jnp.ones((6, 4), int))
    first, between, second, around = only(found).blocks
    line = r"at \S*test_explain.py:\d+"
    assert re.fullmatch(f"a step of the fori_loop {line}", first.words)
    assert between.words == "between loops in a step of the outer scan"
    assert re.fullmatch(f"a step of the while_loop {line}", second.words)
    assert around.words == "around loops in a step of the outer scan"
    assert first.waits
    assert around.waits
    assert not between.waits
    words = f"{around.nanoseconds / 1000:.3g} around loops in a step of the outer scan, where lanes wait for"
    assert words in in_one_line(found)
    lockstep = lx.explain(lambda x: lx.fori_loop(0, 3, lambda _, x: jnp.sin(x), x), 1.0)
    assert only(lockstep).blocks == ()


def test_models():
    cell = eqx.nn.GRUCell(3, 5, key=jax.random.key(0))
    program = lambda cell, xs: lx.scan(lambda c, x: ((c[0], c[0](x, c[1])), None), (cell, jnp.zeros(5)), xs)[0][1].sum()
    found = lx.explain(program, cell, jnp.ones((7, 3)))
    assert found.differentiated[0] == "cell.weight_ih"
    assert roles(only(found))["carry[0].weight_ih"] == "constant"
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    program = lambda layer, x: lx.fori_loop(0, 5, lambda i, c: (c[0], c[0](c[1])), (layer, x))[1].sum()
    loop = only(lx.explain(program, layer, jnp.ones(3)))
    assert roles(loop)["carry[0].kernel"] == "constant"


def test_nothing_is_run_and_types_are_enough():
    ran = []

    def program(x):
        jax.debug.callback(lambda _: ran.append(1), x)
        return lx.fori_loop(0, 3, lambda i, x: jnp.sin(x), x).sum()

    assert only(lx.explain(program, jax.ShapeDtypeStruct((8,), jnp.float32))).leaves[0].size == 32
    jax.effects_barrier()
    assert ran == []


def test_what_is_differentiated():
    """Of Python's numbers, an int is a static length, and a float is differentiated."""
    program = lambda x, n: lx.fori_loop(0, n, lambda i, x: jnp.sin(x), x)
    found = lx.explain(program, 1.0, 7)
    assert (only(found).most_steps, only(found).is_fixed, found.differentiated) == (7, True, ("x",))
    assert only(lx.explain(program, 1.0, jnp.int32(7))).most_steps is None
    program = lambda a, b: lx.fori_loop(0, 3, lambda i, x: jnp.sin(x) * b["x"], a)
    arguments = jnp.float64(1.0), {"x": jnp.float64(1.0), "n": jnp.int32(1)}
    assert lx.explain(program, *arguments).differentiated == ("a", "b['x']")
    assert lx.explain(program, *arguments, argnums=(-1,)).differentiated == ("b['x']",)
    stopped = lambda a, b: program(lax.stop_gradient(a), {"x": 1.0})
    assert only(lx.explain(stopped, *arguments)).stored is None


def test_where_there_is_nothing_to_differentiate():
    found = lx.explain(lambda x: x + 1, 1.0)
    assert (found.loops, str(found)) == ((), "<lambda>: no loops, neither of loopax nor of jax.lax.")
    program = lambda x: lx.scan(lambda c, x: (c + x, c), x.dtype.type(0), x)[0]
    assert only(lx.explain(program, jnp.zeros(0))).most_steps == 0
    found = lx.explain(program, jnp.arange(3))
    assert found.problem == "no floating-point array among the arguments"
    assert "\nno gradient: no floating-point array" in str(found)
    found = lx.explain(lambda x: lx.while_loop(lambda x: x < 9, lambda x: x * 2, x, kind="lax"), 1.0)
    assert found.problem == only(found).problem
    assert "Choose a kind that has it" in found.problem
    found = lx.explain(lambda x: lx.fori_loop(0, 9, lambda i, x: jnp.sin(x), x, kind=lx.Auto(memory=1)), jnp.ones(4))
    assert "stores at least one carry" in only(found).problem


def chosen(p, w, x, **options):
    return lx.cond(p > 0, lambda w, x: jnp.tanh(w @ x), lambda w, x: x, w, x, **options)


def mapped(size, **options):
    program = jax.vmap(lambda p, w, x: chosen(p, w, x, **options), in_axes=(0, None, 0))
    return lx.explain(program, jnp.ones(size), jnp.ones((4, 4)), jnp.ones((size, 4)))


def test_branches_are_listed_as_such():
    found = lx.explain(chosen, 1.0, jnp.ones((4, 4)), jnp.ones(4))
    assert [loop.branch for loop in found.loops] == ["true_fun", "false_fun"]
    first, text = found.loops[0], str(found)
    assert roles(first) == {"operands[0]": "constant", "operands[1]": "constant", "result": "carried"}
    assert text.startswith("chosen: 2 branches, gradient")
    assert f"loopax.cond at {first.source}: true_fun" in text
    assert "runs: if it is taken\n" in text
    assert "steps:" not in text
    pick = lambda i, x: lx.switch(i % 3, [jnp.sin, jnp.cos, lambda x: x], x)
    found = lx.explain(lambda x: lx.fori_loop(0, 5, pick, x), jnp.ones(2))
    (loop,) = found.loops
    assert (loop.branch, [inner.branch for inner in loop.inner]) == ("", [f"branches[{i}]" for i in range(3)])
    assert str(found).startswith("<lambda>: 1 loop and 3 branches")


def test_what_a_batch_of_branches_pays():
    found = mapped(64)
    (warning,) = found.warnings
    assert (warning.name, warning.source) == ("branch-for-all-lanes", found.loops[0].source)
    assert '`cond(..., lanes="compact")`' in warning.message
    assert mapped(8).warnings == mapped(64, lanes="compact").warnings == ()
    runs = lambda **options: in_one_line(mapped(64, **options)).split(" runs: ")[1:]
    everybody = "for all 64 lanes, if one of them takes it"
    assert [run.startswith(f"{everybody} ") for run in runs()] == [True, True]
    costly, cheap = runs(lanes="compact")
    assert costly.startswith("if it is taken, in a batch for the lanes that take it (Compact());")
    assert cheap.startswith(f"{everybody} ")
    alone = [run.startswith("if it is taken, for one lane after another ") for run in runs(lanes="sequential")]
    assert alone == [True, True]


def test_the_text():
    found = lx.explain(recurrent, *ARGS, argnums=0)
    text = repr(found)
    assert text.splitlines()[0] == "recurrent: 1 loop, gradient with respect to params['w']"
    said = ["kind: Auto(), takes ", "steps: at most 100", "gradient stores 100 ", "warnings: 0"]
    assert all(part in text for part in [*said, "body evaluations: forward 100, with the gradient "])
    weights = {f"w{i:02}": jnp.ones(i + 2) for i in range(20)}
    program = lambda w, x: lx.fori_loop(0, 3, lambda i, c: (c[0], c[1] * sum(v[0] for v in w.values())), (w, x))[1]
    assert "12 more" in str(lx.explain(program, weights, 1.0))


def test_tables_are_for_a_terminal(capsys, monkeypatch):
    found = lx.explain(recurrent, *ARGS)
    found.show()
    assert capsys.readouterr().out == f"{found}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    found.show()
    printed = capsys.readouterr().out
    assert "━" in printed
    assert "carry['h']" in printed


BAD: Any = [
    ((recurrent,), {}, TypeError, r"explain\(recurrent, \.\.\.\): the arguments do not fit: missing a required"),
    ((lambda x: 1 if x > 0 else 2, 1.0), {}, TypeError, r"explain\(<lambda>\): the function cannot be traced"),
    ((recurrent, *ARGS), {"argnums": 3}, ValueError, r"explain\(argnums=\.\.\.\): got 3, .* from 0 to 2"),
    ((recurrent, *ARGS), {"argnums": 2}, TypeError, "there are no floating-point arrays in these arguments"),
    ((lambda x: 1 / 0, 1.0), {}, ZeroDivisionError, "division by zero"),  # of the user's
]


def test_bad_input():
    for args, options, error, message in BAD:
        with pytest.raises(error, match=message):
            lx.explain(*args, **options)


W = 0.3 * jnp.eye(3)
X = jnp.ones(3)


def fori(x: Array, w: Array, choice: Any = "auto") -> Array:
    return lx.fori_loop(0, 20, lambda i, x: jnp.tanh(w @ x) + 0.1, x, **argument_of(choice)).sum()


def while_loop(x: Array, w: Array, n: Array, choice: Any = "auto") -> Array:
    body = lambda c: (c[0] + 1, jnp.tanh(w @ c[1]))  # its fixed point is zero
    return lx.while_loop(lambda c: c[0] < n, body, (0, x), max_steps=20, **argument_of(choice))[1].sum()


REVERSIBLE = lx.Reversible(lambda i, x: x, checkpoints=3)
TAPE = lx.Reversible(lambda i, x, row: row, record=lambda i, before, after: before)
SAID = {
    lx.Implicit(): (
        "kind: Auto(), which does nothing here derivative: Implicit(), which differs from that of the steps by a tol",
        "the last carry; its derivative solves a linear system there",
    ),
    lx.Truncated(last=3): (
        "kind: Auto() derivative: Truncated(last=3), which differs from that of the steps on purpose",
        "what Auto() stores of the last 3 steps; where the length is known only",
    ),
    lx.Truncated(window=4): (
        "kind: Auto() derivative: Truncated(window=4), which differs from that of the steps on purpose",
        "the carry before each window of 4 steps, and what Auto() stores of one window",
    ),
    REVERSIBLE: ("", "3 carries and the last; the body is evaluated 3n times, the inverse n times"),
    TAPE: ("", "the last carry and a row of the tape for each step"),
}


@pytest.mark.parametrize("choice", SAID, ids=str)
def test_kinds_and_derivatives_with_a_way_of_their_own(choice: lx.Kind | lx.Derivative) -> None:
    lines, words = SAID[choice]
    derivative = choice if isinstance(choice, lx.Derivative) else None
    explanation = lx.explain(lambda x, w: fori(x, w, choice), X, W)
    loop = next(loop for loop in explanation.loops if loop.kind is not None)
    assert loop.function == "loopax.fori_loop"
    assert "test_explain.py" in loop.source
    assert (loop.most_steps, loop.derivative, loop.stored) == (20, derivative, None)
    text = " ".join(str(explanation).split())
    assert f"gradient stores {words}" in text
    assert lines in text
    assert ("derivative: " in text) == (derivative is not None)
    if derivative is not None:  # these have a rule for derivatives, in which the loop stands
        (loop,) = lx.explain(lambda x, w, n: while_loop(x, w, n, choice), X, W, jnp.int32(5)).loops
        assert "test_explain.py" in loop.source
        assert all(leaf.is_differentiated for leaf in loop.leaves if leaf.name == "carry[1]")


def test_compare() -> None:
    """The gradient of two steps out of twenty takes less memory than that of all."""
    kinds = ["bounded", lx.Implicit(), lx.Truncated(last=2), lx.Truncated(window=5), REVERSIBLE]
    rows = {row.name: row for row in lx.compare(fori, jnp.ones(300), 0.3 * jnp.eye(300), kinds=kinds, rounds=1).rows}
    good = {name for name, row in rows.items() if not row.problem}
    assert good > {"Implicit()", "Truncated(last=2)", "Truncated(window=5)"}
    assert "brings the inverse of the steps of one loop" in rows[repr(REVERSIBLE)].problem
    assert rows["Truncated(last=2)"].temporary_bytes < 0.5 * rows["Bounded()"].temporary_bytes


def warned(function, *args, **options):
    """Names of the warnings and the lines that they name."""
    found = []
    with open(__file__) as file:
        lines = file.read().splitlines()
    for warning in lx.explain(function, *args, **options).warnings:
        assert "test_explain.py:" in warning.source
        found.append((warning.name, lines[int(warning.source.split(":")[1].split()[0]) - 1].strip()))
    return found


ONES = jnp.ones(8)


def by_index(i, x, rows):
    return jnp.sin(x), rows.at[i].set(x)  # written


def by_slices(i, x, rows):
    rows = lax.dynamic_update_index_in_dim(rows, x, i, 0)  # written
    return jnp.sin(x), rows


def under_a_constant_condition(i, x, rows):
    new = rows.at[i].set(x)  # written
    return jnp.sin(x), jnp.where(True, new, rows)


def with_rows_read(i, x, rows):
    x = jnp.sin(x + rows[i // 2])
    return x, rows.at[i].set(x)  # written


def of_rows(step, x, n=100):
    return lx.fori_loop(0, n, lambda i, c: step(i, *c), (x, jnp.zeros((100, 8))), max_steps=100)[1].sum()


def of_rows_in_jax(x):
    step = lambda c: (c[0] + 1, *by_slices(*c))
    return lax.while_loop(lambda c: c[0] < 100, step, (0, x, jnp.zeros((100, 8))))[2].sum()


def of_rows_without_a_bound(x):
    step = lambda c: (c[0] + 1, *by_slices(*c))
    return lx.while_loop(lambda c: c[0] < 100, step, (0, x, jnp.zeros((100, 8))))[2].sum()


def of_rows_read_without_a_bound(x):
    step = lambda c: (c[0] + 1, *with_rows_read(*c))
    return lx.while_loop(lambda c: c[0] < 100, step, (0, x, jnp.zeros((100, 8))))[2].sum()


def test_a_trajectory_in_the_carry():
    """In a loop that touches all of it: of JAX, without a bound, or where the old or the new array is chosen."""
    for program in (of_rows_in_jax, partial(of_rows, under_a_constant_condition)):
        ((name, line),) = warned(program, ONES)
        assert (name, line.endswith("# written")) == ("trajectory-in-carry", True)
    for step in (by_index, by_slices, with_rows_read):
        mapped = jax.vmap(lambda x, n: of_rows(step, x, n))  # noqa: B023
        assert not warned(partial(of_rows, step), ONES)
        assert not warned(mapped, jnp.ones((4, 8)), jnp.arange(4, dtype=jnp.int32))
    assert not warned(of_rows_without_a_bound, ONES)  # no version is stored, for none is read
    line = "return x, rows.at[i].set(x)  # written"
    assert warned(of_rows_read_without_a_bound, ONES) == [("rows-written-in-carry", line)]


def test_no_rows_in_the_carry():
    """A stream, a buffer, a small array, one of few rows, and one that changes as a whole."""

    def carried(rows, step, n=100, fori_loop=lax.fori_loop):
        def program(x):
            last = fori_loop(0, n, lambda i, c: (jnp.sin(c[0]), step(i, *c)), (x, rows))[1]
            return getattr(last, "rows", last).sum()

        return program

    stream = lambda x: lx.scan(lambda x, _: (jnp.sin(x), x), x, length=100)[1].sum()
    buffer = carried(lx.Buffer(100, like=ONES), lambda i, x, rows: rows.append(x), fori_loop=lx.fori_loop)
    small = carried(jnp.zeros(10), lambda i, x, rows: rows.at[i].set(x[0]), 10)
    few = carried(jnp.zeros((4, 512)), lambda i, x, rows: rows.at[i].set(x[0]), 4)
    whole = carried(jnp.zeros((100, 8)), lambda i, x, rows: (rows * 0.9).at[i].set(x))
    for program in (stream, buffer, small, few, whole):
        assert warned(program, ONES) == [], program


def test_a_round_trip_through_another_dtype():
    """A copy may be cast, and a leaf that does change."""

    def lossy(w, x):
        low = w.astype(jnp.bfloat16)
        x = jnp.tanh((x.astype(jnp.bfloat16) @ low).astype(x.dtype))
        return low.astype(w.dtype), x  # there and back

    copy = lambda w, x: (w, jnp.tanh(x @ w.astype(jnp.bfloat16).astype(w.dtype)))
    changes = lambda w, x: ((w.astype(jnp.bfloat16) * 2).astype(w.dtype), jnp.tanh(x @ w))
    found = [("dtype-round-trip", "return low.astype(w.dtype), x  # there and back")]
    for step, expected in ((lossy, found), (copy, []), (changes, [])):
        program = lambda w, x, step=step: lx.fori_loop(0, 5, lambda i, c: step(*c), (w, x))[1].sum()
        assert warned(program, jnp.ones((8, 8)), ONES) == expected


def test_a_batch_that_waits():
    lane = lambda loop, **options: jax.vmap(lambda x: loop(lambda x: x < 10.0, lambda x: x * 1.5, x, **options))
    for loop in (lx.while_loop, lax.while_loop):
        assert [name for name, _ in warned(lane(loop), jnp.ones(100))] == ["slowest-lane"]
    assert warned(lane(lx.while_loop), jnp.ones(8)) == []  # no more lanes than a device computes together
    with lx.configure(calibration="h100"):
        assert warned(lane(lx.while_loop), jnp.ones(100)) == []
        assert [name for name, _ in warned(lane(lx.while_loop), jnp.ones(5000))] == ["slowest-lane"]
    assert warned(lane(lx.while_loop, lanes="compact"), jnp.ones(100)) == []
    assert warned(lane(lx.while_loop, lanes="auto"), jnp.ones(100)) == []  # it has compared them
    assert warned(jax.vmap(lambda x: lx.fori_loop(0, 10, lambda i, x: x * 1.5, x)), jnp.ones(100)) == []
    inner = lambda i, x: lx.fori_loop(0, i, lambda j, x: x * 1.5, x)
    assert warned(jax.vmap(lambda n: lx.fori_loop(0, n, inner, 1.0, lanes="free")), jnp.arange(100)) == []
    inner_of = lambda n: lambda i, x: lx.fori_loop(0, n + i, lambda j, x: x * 1.5, x)
    nest = lx.explain(jax.vmap(lambda n: lx.fori_loop(0, n, inner_of(n), 1.0)), jnp.arange(100))
    assert ['`lanes="free"`' in warning.message for warning in nest.warnings if warning.name == "slowest-lane"] == [
        True,  # of the outer loop
        False,
    ]


def deep(x, **options):
    def step(x, _):
        for _ in range(8):
            x = jnp.sin(jnp.exp(-(x**2)))
        return x, None

    scan = options.pop("scan", lx.scan)
    return scan(step, x, length=1000, **options)[0].sum()


def test_large_residuals():
    """None of another kind, of the choice of `Auto`, hardly any in all, no gradient, residuals like the carry."""
    x = jnp.ones(64)
    for options in ({"kind": "residuals"}, {"kind": "lax"}, {"scan": lax.scan}):
        (warning,) = lx.explain(lambda x, options=options: deep(x, **options), x).warnings
        assert warning.name == "large-residuals"
        assert "times the carry" in warning.message
        assert str(warning).startswith(warning.source)
        assert str(warning).endswith("[large-residuals]")
    light = lambda x: lx.fori_loop(0, 10_000, lambda i, x: jnp.sin(x), x, kind="residuals").sum()
    for program in (partial(deep, kind="bounded"), deep, lambda x: deep(lax.stop_gradient(x), kind="residuals"), light):
        assert lx.explain(program, x).warnings == ()
    assert lx.explain(partial(deep, kind="residuals"), jnp.ones(1)).warnings == ()


# ---- what a gradient compiles


@pytest.mark.parametrize(
    ("kind", "inner", "outer"),
    [("residuals", (1, 3), (1, 2)), (lx.Checkpointed(), (1, 5), (1, 4)), ("lax", (1, 3), (1, 2))],
)
def test_operations_of_a_body_in_the_program(kind, inner, outer):
    """A sine, its cosine and its product with a cotangent, and an exponential; with checkpoints, evaluated again."""

    def f(x):
        def step(x, _):
            x = lx.fori_loop(0, 3, lambda i, x: jnp.sin(x), x)
            return jnp.exp(x), None

        return lx.scan(step, x, length=5, kind=kind)[0].sum()

    around, inside = lx.explain(f, jnp.ones(3)).walk()
    assert (around.operations, inside.operations) == (outer, inner)
    assert f"operations of the body: 1, with the gradient {inner[1]} (" in str(lx.explain(f, jnp.ones(3)))


def test_operations_are_not_counted_where_jax_cannot_lower_the_program():
    """Of a symbolic shape, or on an axis that has no length here: the gradient is explained all the same."""
    f = lambda x: lx.scan(lambda x, _: (jnp.sin(x), None), x, length=5)[0].sum()
    found = lx.explain(f, jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), "float32"))
    assert (found.problem, only(found).operations) == ("", (0, 0))

    def on_axis(x):
        found = lx.explain(lambda x: lx.scan(lambda c, _: (c + lax.psum(c, "i"), None), x, length=5)[0].sum(), x)
        assert (found.problem, only(found).operations) == ("", (0, 0))
        return x

    jax.vmap(on_axis, axis_name="i")(jnp.ones(4))


def test_what_is_explained_without_a_mesh_is_not_taken_for_what_is_run_on_it():
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,))

    def f(x):
        loop = lambda x: lx.scan(lambda c, _: (jnp.sin(c), None), x, length=5)[0]
        return jax.shard_map(loop, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))(x).sum()

    x = jnp.linspace(0.1, 0.5, 4)
    kept = jax.make_jaxpr(f)(x)  # the program of the loop is recognised while this one is in use
    assert lx.explain(f, x).problem == ""
    expected = jax.grad(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=5)[0].sum())(x)
    np.testing.assert_allclose(jax.grad(f)(x), expected, rtol=1e-6)
    del kept


def test_operations_are_not_counted_without_a_gradient():
    found = lx.explain(lambda n: lx.while_loop(lambda i: i < n, lambda i: 2 * i, 1), jnp.int32(9))
    assert only(found).operations == (0, 0)
    assert "operations of the body" not in str(found)
