"""What makes a program another one for a stored run, and what does not; what is said then."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import loopax as lx
from loopax import durable
from loopax._src.durable.step_hash import Written, fingerprint
from loopax._src.frontend.run_time_checks import collecting
from tests.durable.cases import same_bits
from tests.hosts.processes import Processes
from tests.support.reference import assert_close

X = jnp.array([1.0, -0.5, 2.0])
XS = jnp.asarray(np.random.RandomState(0).randn(20, 3))
TABLE = np.arange(3.0)
TWO = jnp.asarray(2.0)
LANES = jnp.arange(3, dtype=jnp.int32)


def written(function: Callable[..., Any], *arguments: Any) -> Written:
    """As a durable loop sees it: checks are handed over."""

    def unchecked(*arguments: Any) -> Any:
        with collecting():
            return function(*arguments)

    closed = jax.make_jaxpr(unchecked)(*(arguments or (X,)))
    return Written(closed, [f"input {i}" for i in range(len(closed.in_avals))], {}, [])


def of_code(source: str) -> Any:
    """A function of a module of this text."""
    scope: dict[str, Any] = {"__name__": "somewhere", "jax": jax, "jnp": jnp, "lx": lx}
    exec(compile(source, f"<{len(source)} letters>", "exec"), scope)
    return scope["work"]


def renamed(x: Any) -> Any:
    return jnp.sin(x) * 2.0


def shown(x: Any) -> Any:
    jax.debug.print("{x} {y}", x=x, y=(x * TABLE).sum())
    unused = jnp.cos(x)
    jax.debug.callback(lambda _: None, unused, ordered=True)
    return jnp.sin(x) * 2.0


def while_of(x: Any, **how: Any) -> Any:
    options: dict[str, Any] = {"max_steps": 9, **how}
    return lx.while_loop(lambda x: x[0] < 4, lambda x: x + 1.0, x, **options)


def fori_of(x: Any, n: Any = 3, **how: Any) -> Any:
    return lx.fori_loop(0, n, lambda _, x: jnp.sin(x), x, **how)


def cosine_of(x: Any, n: Any = 3, **how: Any) -> Any:
    return lx.fori_loop(0, n, lambda _, x: jnp.cos(x), x, **how)


def lanes_of(x: Any, **how: Any) -> Any:
    return jax.vmap(partial(fori_of, max_steps=4, **how))(x, LANES)


def with_a_buffer(x: Any, read: Any = 2.0) -> Any:
    """Rows that are appended in a loop, and read there."""
    start = lx.Buffer(4, like=x).append(x)
    return lx.fori_loop(0, 3, lambda i, b: b.append(b[i] * read), start).rows.sum()


def with_a_reference(x: Any, *, first: bool) -> Any:
    """What a reference holds before and after something is written to it."""
    ref = jax.new_ref(x)
    before = ref[...]
    ref[...] = before * 2.0
    return before if first else ref[...]


def ruled(factor: float, rule: float) -> Any:
    """A function with a derivative of its own."""
    function = jax.custom_jvp(lambda x: jnp.sin(x) * factor)
    jvp = "def work(p, t): return jnp.sin(p[0]) * 2.0, t[0] * {}"
    function.defjvp(of_code(jvp.format(rule)))
    return function


def ruled_backward(rule: float) -> Any:
    function = jax.custom_vjp(lambda x: jnp.sin(x) * 2.0)
    function.defvjp(lambda x: (jnp.sin(x), None), of_code(f"def work(_, g): return (g * {rule},)"))
    return function


def called(work: Any) -> Any:
    return lambda x: jax.pure_callback(work, jax.ShapeDtypeStruct((3,), float), x)


MOVED = "def work(x):\n    y = help(x)\n    return jax.jit(lambda y: lx.fori_loop(0, 3, lambda i, y: y * 2.0, y))(y)\n"
HELP = "def help(x):\n    return jnp.sin(x)\n"
progress = lx.Progress("a name", style="text")
checked = lambda text: lambda x: eqx.error_if(x, x[0] > 3, text)

SAME: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a name": (lambda x: jnp.sin(x) * 2.0, renamed),
    "a place and a comment": (of_code(HELP + MOVED), of_code(f"# a comment\n\n{MOVED}\n\n{HELP}")),
    "jit and an order of equations": (
        of_code("def work(x):\n  a = jnp.sin(x)\n  b = jnp.cos(x)\n  return a, b"),
        jax.jit(of_code("def work(x):\n  b = jnp.cos(x)\n  a = jnp.sin(x)\n  return a, b"), donate_argnums=0),
    ),
    "checkpoint": (renamed, jax.checkpoint(renamed)),
    "what is shown": (renamed, shown),
    "a scalar closed over": (renamed, lambda x: jnp.sin(x) * TWO),
    "a device": (renamed, lambda x: jax.device_put(jax.lax.optimization_barrier((x, renamed(x)))[1])),
    "how a loop is differentiated, and a check": (while_of, lambda x: while_of(x, kind="bounded", throw=False)),
    "steps in an iteration, and progress": (fori_of, lambda x: fori_of(x, unroll=2, progress=progress)),
    "how lanes are differentiated": (
        lambda x: lanes_of(x, lanes="compact"),
        lambda x: lanes_of(x, lanes="compact", kind="bounded"),
    ),
    "the message of a check": (checked("one"), checked("another")),
    "the functions of a rule": (ruled(2.0, 1.0), ruled(2.0, 1.0)),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_what_changes_no_value_does_not_count(one: Any, other: Any) -> None:
    a, b = written(one), written(other)
    codes = lambda found: {name: function["code"] for name, function in found.functions.items()}
    assert (a.hash, list(a.arrays), codes(a)) == (b.hash, list(b.arrays), codes(b))


OTHER: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "an operation": (jnp.sin, jnp.cos),
    "a number": (lambda x: x * 2.0, lambda x: x * 2.0000000000000004),
    "a sign of zero": (lambda x: x + 0.0, lambda x: x + -0.0),
    "an order": (lambda x: x - TABLE, lambda x: TABLE - x),
    "a result": (lambda x: (x, x + 1), lambda x: (x + 1, x)),
    "a number in jit": (jax.jit(lambda x: x * 2.0), jax.jit(lambda x: x * 3.0)),
    "a bound": (while_of, lambda x: while_of(x, max_steps=8)),
    "a body": (fori_of, cosine_of),
    "a number of steps": (fori_of, lambda x: fori_of(x, 4)),
    "a branch": (
        lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.cond(x[0] > 0, jnp.cos, jnp.sin, x),
    ),
    "a body in a gradient": (
        jax.grad(lambda x: fori_of(x, kind="checkpointed").sum()),
        jax.grad(lambda x: cosine_of(x, kind="checkpointed").sum()),
    ),
    "compact lanes": (
        lambda x: lanes_of(x, lanes="compact"),
        lambda x: jax.vmap(partial(cosine_of, max_steps=4, lanes="compact"))(x, LANES),
    ),
    "a buffer's rows": (with_a_buffer, lambda x: with_a_buffer(x, 3.0)),
    "when a reference is read": (partial(with_a_reference, first=True), partial(with_a_reference, first=False)),
    "how often something happens": (
        lambda x: io_callback(print, None, x),
        lambda x: [io_callback(print, None, x) for _ in range(2)],
    ),
    "a function with a rule": (ruled(2.0, 1.0), ruled(3.0, 1.0)),
    "that there is a rule": (renamed, ruled(2.0, 1.0)),
}


@pytest.mark.parametrize(("one", "other"), OTHER.values(), ids=OTHER)
def test_what_changes_a_value_counts(one: Any, other: Any) -> None:
    assert written(one).hash != written(other).hash


def test_another_rule_for_derivatives_is_another_function() -> None:
    for rule in (partial(ruled, 2.0), ruled_backward):
        one, other = written(rule(1.0)), written(rule(3.0))
        assert one.hash == other.hash
        assert one.functions.keys() == other.functions.keys()
        (changed,) = [name for name in one.functions if one.functions[name] != other.functions[name]]
        assert changed.split()[0] == "rule"
        assert one.functions[changed]["name"] == other.functions[changed]["name"] == "somewhere.work"


def helper(x: Any) -> Any:
    return x + 1.0


def calls_a_helper(x: Any) -> Any:
    return helper(x)


class Work:
    """An object with a state of its own."""

    def applied(self, x: Any, how: Any) -> Any:
        return how(x)


def closing_over(value: Any, function: Any) -> Any:
    return lambda x: function(x) + value


def scaled(x: Any, scale: Any) -> Any:
    return x * scale


def test_functions_with_the_same_code_are_the_same() -> None:
    code = lambda work: written(called(work)).functions["callback 0"]["code"]
    plain = "def work(x): return help(x)\ndef help(x): return x + 1.0\n"
    same = [
        (of_code(plain), of_code(f"# a line above\n\n{plain}\nOTHER = 3\n")),
        (closing_over(1.0, helper), closing_over(2.0, helper)),  # a number of a file, say
        (partial(scaled, scale=(1, Work())), partial(scaled, scale=(1, Work()))),
    ]
    assert all(code(one) == code(other) != "" for one, other in same)
    others = [
        (of_code(plain), of_code(plain.replace("1.0", "1.5"))),  # what it calls
        (closing_over(1.0, helper), closing_over(1.0, calls_a_helper)),
        (partial(scaled, scale=np.arange(3.0)), partial(scaled, scale=np.arange(3.0) + 1)),
        (of_code("def work(x, *, a='b'): return x"), of_code("def work(x, *, a='c'): return x")),
        (partial(Work().applied, how=helper), partial(Work().applied, how=calls_a_helper)),
        (lambda x: [y - 1 for y in x], lambda x: [y + 1 for y in x]),
    ]
    assert all(code(one) != code(other) for one, other in others)
    assert fingerprint(max) == {"name": "builtins.max", "code": ""}
    assert fingerprint(np.sin) != fingerprint(np.cos)


def programs(directory: Path) -> dict[str, Any]:
    """Runs that differ in one thing from the first, with what the error says."""
    shape, w = jax.ShapeDtypeStruct((3,), jnp.float64), jnp.arange(3.0)
    one, two = (lambda x: x * 2.0), (lambda x: x * 3.0)

    def at(wave: Any = jnp.sin, w: Any = w, work: Any = one, factor: Any = None, **changed: Any) -> Any:
        def f(c: Any, x: Any, key: Any) -> Any:
            return jax.pure_callback(work, shape, wave(c) * w) + (x if factor is None else factor * x), c.sum()

        options: Any = {"init": X, "xs": XS, "key": jax.random.key(0), "chunk_steps": 2, "length": 4, **changed}
        return partial(durable.scan, f, directory=directory, **options)

    return {
        "same": (at(), ""),
        "body": (at(jnp.cos), "  the step computes something else"),
        "number": (at(factor=2.0), "  the step computes something else"),
        "closure": (at(w=w + 1.0), r"  closed-over value \d+, float64\[3\]: other values"),
        "callback": (at(work=two), r"  callback 0: stored (.*)<lambda>, now \1<lambda> with other code"),
        "init": (at(init=X + 1), "  first carry: other values"),
        "xs": (at(xs=XS.at[9, 2].add(1e-9)), "  xs, array 0: other values"),
        "key": (at(key=jax.random.key(1)), "  key: other values"),
        "rows": (at(xs=XS[:-1]), "  rows of xs: stored 20, now 19\n  xs, array 0: other values"),
        "row": (at(xs=XS.astype(jnp.float32)), r"  a row of xs, array 0: stored float64\[3\], now float32\[3\]"),
        "reverse": (at(reverse=True), "  first row: stored 0, now 3"),
    }


def test_another_program_is_an_error_that_says_what_differs(tmp_path: Any) -> None:
    runs = programs(tmp_path)
    expected = runs["same"][0]()
    for name, (run, message) in runs.items():
        # One adds a number of 32 bits to one of 64.
        with jax.numpy_dtype_promotion("standard" if name == "row" else "strict"):
            if name == "same":
                same_bits(run()[0], expected[0])
                continue
            with pytest.raises(ValueError, match=f"is one of another program:\n{message}") as error:
                run()
        assert 'give resume="anyway"' in str(error.value)
        assert str(error.value).count("\n  ") == 1 + (name in ("rows", "row"))  # it says nothing else


def test_anyway_goes_on_with_a_warning_and_writes_it_down(tmp_path: Any) -> None:
    run = lambda factor, upper, **o: durable.fori_loop(0, upper, lambda _, x: x * factor, X, directory=tmp_path, **o)
    run(2.0, 3)
    stored = lambda: json.loads((tmp_path / "program.json").read_text())
    assert stored()["went_on_anyway"] == []
    with pytest.warns(durable.AnotherProgramWarning, match=r"going on with a run of another program:\n.*something el"):
        result = run(3.0, 5, resume="anyway")
    assert_close(result, X * 8 * 9)
    assert_close(run(3.0, 6), X * 8 * 27)  # it is the program of this run now
    (said,) = stored()["went_on_anyway"]
    assert said.endswith("\n  the step computes something else")
    with pytest.raises(ValueError, match="one of another program"):
        run(2.0, 7)


def test_other_data_and_types_are_an_error_whatever_resume_says(tmp_path: Any) -> None:
    runs = programs(tmp_path / "data")
    runs["same"][0]()
    stored = (tmp_path / "data" / "program.json").read_text()
    for name in ("xs", "key", "rows", "reverse"):
        run, message = runs[name]
        with pytest.raises(ValueError, match=f'cannot go on with other data, also with resume="anyway":\n{message}'):
            run(resume="anyway")
    assert (tmp_path / "data" / "program.json").read_text() == stored
    options: Any = {"directory": tmp_path / "types", "resume": "anyway"}
    run = partial(durable.fori_loop, 0, 3, lambda _, x: x, **options)
    run({"a": X})
    with pytest.raises(ValueError, match=r"carry\['a'\]: stored float64\[3\], now float32\[3\]"):
        run({"a": X.astype(jnp.float32)})
    with pytest.raises(ValueError, match=r"carry\['b'\]: stored nothing, now float64\[\]"):
        run({"a": X, "b": 1.0})
    with pytest.raises(ValueError, match=r"the loop: stored durable.fori_loop, now durable.while_loop"):
        durable.while_loop(lambda c: c["a"][0] < 0, lambda c: c, {"a": X}, **options)


def test_other_versions_and_formats_are_refused_by_name(tmp_path: Any) -> None:
    run = partial(durable.fori_loop, 0, 3, lambda _, x: x * 2.0, X, directory=tmp_path)
    result = run()
    path = tmp_path / "program.json"
    stored = json.loads(path.read_text())
    for loopax_version, jax_version in ((lx.__version__, "0.1.2"), ("0.1.2", jax.__version__)):
        path.write_text(json.dumps({**stored, "loopax": loopax_version, "jax": jax_version}))
        name = f"loopax {loopax_version} and JAX {jax_version}"
        with pytest.raises(ValueError, match=f"  stored by {name}, and this is loopax {lx.__version__} and JAX"):
            run()
        with pytest.warns(durable.AnotherProgramWarning, match=f"going on with.*\n  stored by {name}"):
            same_bits(run(resume="anyway"), result)
        found = json.loads(path.read_text())
        assert name in found["went_on_anyway"][0]
        assert {**found, "went_on_anyway": []} == stored
    second = json.loads((Path(__file__).parent / "stored" / "format2.json").read_text())  # of a run of version 0.1.0
    for found in (second, {"format": 99, "loopax": "7.0", "jax": "9.9"}):
        path.write_text(json.dumps(found))
        versions = f"loopax {found['loopax']} and JAX {found['jax']} in format {found['format']}, and this is loopax"
        with pytest.raises(RuntimeError, match=f"was stored by {versions}.* Go on with the versions that have stored"):
            run(resume="anyway")
    for garbage in ("{", "[]", '{"format": 3}', "\0\xff", json.dumps({**stored, "more": 1})):
        path.write_text(garbage)
        with pytest.raises(RuntimeError, match="is no description of a run that loopax has written"):
            run(resume="anyway")
    path.write_text(json.dumps(stored))
    same_bits(run(), result)


def run_everything(directory: Any, upper: Any) -> list[float]:
    """A program whose text holds functions, callbacks, rules, keys, NNX objects, and all kinds of loops."""
    from flax import nnx

    module = nnx.Linear(3, 3, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    activation = eqx.Partial(jnp.clip, min=-2.0)  # a function in a pytree, with an address in its text
    key, shape = jax.random.key(1), jax.ShapeDtypeStruct((3,), jnp.float64)

    def body(i: Any, c: Any) -> Any:
        activation, module, x = c
        x = activation(ruled(2.0, 1.0)(ruled_backward(1.0)(x))) + jax.random.normal(key, (3,))
        x = jax.pure_callback(lambda x: x * 2.0, shape, x) + jax.jit(jnp.cos)(x)
        x = jax.lax.cond(i > 2, lambda x: x + 1.0, lambda x: x, x)
        jax.debug.callback(lambda _: None, x)
        x = x + 0.01 * jax.grad(lambda x: fori_of(x, kind="checkpointed").sum() + while_of(x, throw=False).sum())(x)
        x = x + 0.01 * jax.vmap(jax.grad(with_a_buffer))(x) + lanes_of(x, lanes="compact")
        return activation, module, x + module(x)

    return durable.fori_loop(0, int(upper), body, (activation, module, X), directory=directory)[2].tolist()


@pytest.mark.slow
def test_the_program_is_the_same_in_another_process(tmp_path: Any) -> None:
    """Which orders sets otherwise."""
    expected = run_everything(tmp_path / "whole", 6)
    run_everything(tmp_path / "run", 3)
    with Processes("tests.durable.test_stored_program:run_everything", 1, 1, [tmp_path / "run", 6]) as process:
        assert process.found() == [expected]


@pytest.mark.parametrize("name", ["jit", "cond", "rule", "scan"])
def test_values_that_inner_functions_close_over_count(name: str) -> None:
    """Wherever JAX keeps them, but only those that are used."""

    def values(number: float) -> Any:
        table = np.arange(3.0) + number
        array = jnp.asarray(table)
        rule = jax.custom_jvp(lambda x: x + array)
        rule.defjvp(lambda x, t: (rule(x[0]), t[0]))
        inner: Any = {
            "jit": jax.jit(lambda x: x + table),
            "cond": lambda x: jax.lax.cond(x[0] > 0, lambda x: x + array, lambda x: x, x),
            "rule": rule,
            "scan": lambda x: lx.scan(lambda c, _: (c + array, None), x, length=2)[0],
        }
        return [x.tolist() for x in map(np.asarray, written(inner[name]).arrays.values())]

    assert [values(1.0), values(1.5)] == [[[1.0, 2.0, 3.0]], [[1.5, 2.5, 3.5]]]
    assert written(shown).arrays == {}
    key = jax.random.key(0)
    assert list(written(lambda x: x + jax.random.normal(key)).arrays) == ["closed-over value 0, key<fry>[]"]
