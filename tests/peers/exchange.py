"""A plugin for pytest that runs a peer's own tests with loopax's loops in the place of the peer's.

It is loaded into a process of its own by `run.py`, beside the peer's tests and not as a part of this package.
"""

import functools as ft
import inspect
import re
import sys
import tomllib
import types
from collections.abc import Callable, Generator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import equinox.internal
import jax
import jax._src.test_util  # so that only tests are imported while JAX's loops are exchanged
import jax.lax
import pytest

import loopax as lx

# The excluded tests of each file, and those that `--some quick` runs.
RULES: dict[str, Sequence[dict[str, Any]]] = tomllib.loads((Path(__file__).parent / "excluded.toml").read_text())
QUICK: dict[str, Sequence[str]] = tomllib.loads((Path(__file__).parent / "quick.toml").read_text())
RULE = pytest.StashKey[dict[str, Any]]()

# How a loop looks in a peer's tests, where it is more than the name. What Diffrax's tests call has loops within.
LOOPS = {
    "jax": r"\b(while_loop|fori_loop|scan|cond|switch)\b",
    "flax": r"\bnnx\.(while_loop|fori_loop|scan)\b",
    "diffrax": "",
}

# ---- loopax's loops with a peer's arguments


def equinox_while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_steps: int | None = None,
    buffers: Any = None,  # any array of the carry may be read and written
    kind: str,
    checkpoints: int | None = None,
    base: int = 16,  # how Equinox nests the loops of kind="bounded"
) -> Any:
    """`equinox.internal.while_loop`."""
    return lx.while_loop(cond_fun, body_fun, init_val, max_steps=max_steps, kind=_kind(kind, checkpoints), throw=False)


def equinox_scan(
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    length: int | None = None,
    *,
    buffers: Any = None,
    kind: str,
    checkpoints: Any = None,
) -> Any:
    """`equinox.internal.scan`."""
    return lx.scan(f, init, xs, length, kind=_kind(kind, checkpoints))


def nnx_while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any, **_: Any) -> Any:
    """`nnx.while_loop`; its options say how NNX traces."""
    return lx.while_loop(cond_fun, body_fun, init_val)


def nnx_fori_loop(
    lower: Any, upper: Any, body_fun: Callable[..., Any], init_val: Any, *, unroll: Any = None, **_: Any
) -> Any:
    """`nnx.fori_loop`."""
    return lx.fori_loop(lower, upper, body_fun, init_val, unroll=unroll)


def _kind(name: str, checkpoints: Any) -> lx.Kind:
    """The kind of loopax that stores what Equinox's kind does."""
    if checkpoints == "all":
        return lx.Bounded()
    return {"lax": lx.Lax(), "bounded": lx.Bounded(), "checkpointed": lx.Checkpointed(checkpoints)}[name]


def jax_with_loopax() -> types.ModuleType:
    """The module `jax`, in whose `lax` the loops and branches are loopax's."""
    loops = {"while_loop": lx.while_loop, "fori_loop": lx.fori_loop, "scan": lx.scan}
    lax = _changed(jax.lax, **loops, cond=lx.cond, switch=lx.switch)
    return _changed(jax, lax=lax)


def _changed(module: types.ModuleType, **names: Any) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update(vars(module) | names)
    return copy


# ---- in the peer's tests


def pytest_addoption(parser: Any) -> None:
    """Which of a peer's tests run."""
    parser.addoption("--some", choices=["quick"], help="those that `quick.toml` lists")


def pytest_configure(config: Any) -> None:
    """Equinox's and Flax's tests look their loops up when they are called; Diffrax when it is imported, after this."""
    equinox.internal.while_loop = equinox_while_loop
    equinox.internal.scan = equinox_scan
    if config.rootpath.name == "flax":
        from flax import nnx
        from nnx_scan import nnx_scan

        nnx.while_loop, nnx.fori_loop, nnx.scan = nnx_while_loop, nnx_fori_loop, nnx_scan


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Generator[None, Any, Any]:
    """JAX's tests import `jax` and `jax.lax` when they are collected. To Equinox's, `jax.lax` is the reference."""
    exchanged = collector.path.name == "lax_control_flow_test.py"
    sys.modules["jax"] = jax_with_loopax() if exchanged else jax
    try:
        return (yield)
    finally:
        sys.modules["jax"] = jax


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out tests without loops; those on the list must fail, for the reason that it gives."""
    loops = LOOPS.get(config.rootpath.name, r"\b(while_loop|fori_loop|scan)\b")
    with_loops = [item for item in items if re.search(loops, _source(item)) and _is_chosen(config, item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in with_loops])
    items[:] = with_loops
    for item in items:
        if rule := find_rule(item.path.stem, item.name):
            item.stash[RULE] = rule
            mark = pytest.mark.skip if rule.get("skip") else ft.partial(pytest.mark.xfail, strict=True)
            item.add_marker(mark(reason=rule["reason"]))


def _is_chosen(config: Any, item: Any) -> bool:
    is_one_of_all = config.getoption("--some") is None or config.rootpath.name != "diffrax"
    return is_one_of_all or item.name in QUICK.get(item.path.stem, ())


def _source(item: Any) -> str:
    return inspect.getsource(inspect.unwrap(item.function))


def find_rule(file: str, test: str) -> dict[str, Any] | None:
    """Why a test is excluded, if it is."""
    return next((rule for rule in RULES.get(file, ()) if any(fnmatchcase(test, p) for p in rule["tests"])), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    """A test that is excluded from a line on must fail there, and nowhere before."""
    report = yield
    line = item.stash.get(RULE, {}).get("from_line")
    if line and call.when == "call" and hasattr(report, "wasxfail") and report.skipped:
        entries = [entry for entry in call.excinfo.traceback if Path(entry.path) == item.path]
        if line not in str(entries[-1].statement):
            report.outcome, report.longrepr = "failed", f"fails before {line!r}:\n{call.excinfo.getrepr()}"
            del report.wasxfail
    return report
