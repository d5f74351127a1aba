"""The structure of the package: imports only point down, and `__all__` is complete."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import loopax
from loopax import _public

ROOT = Path(loopax.__file__).parent

# From the bottom up. A module may import from those before it.
LAYERS = [
    "loopax._version",
    "loopax._compat",
    "loopax._lines",
    "loopax._unexported",
    "loopax._raising",
    "loopax._errors",
    "loopax._types",
    "loopax._extras",
    "loopax._naming",
    "loopax._structure",
    "loopax._carry",
    "loopax._static",
    "loopax.schedule.actions",
    "loopax.schedule.blocks",
    "loopax.schedule.binomial",
    "loopax.schedule.online",
    "loopax.schedule.published",
    "loopax.schedule.machine",
    "loopax.schedule.saving",
    "loopax.schedule.timeline",
    "loopax.schedule.drawing",
    "loopax.schedule.picture",
    "loopax.schedule.stages",
    "loopax.schedule",
    "loopax.schedule.occupancy",
    "loopax.core.storage",
    "loopax.core.invalid",
    "loopax.core.jaxprs",
    "loopax.core.devices",
    "loopax.core.axes",
    "loopax.core.cost",
    "loopax.core.dependence",
    "loopax.core.expansion",
    "loopax.core.common_rows",
    "loopax.core.lending",
    "loopax.core.reporting",
    "loopax.core.silence",
    "loopax.core.origin",
    "loopax.core.loop",
    "loopax.core.walk",
    "loopax.core.saving",
    "loopax.core.lowering",
    "loopax.core.replay",
    "loopax.core.buffers",
    "loopax.core.versions",
    "loopax.core.effects",
    "loopax.core.jvp",
    "loopax.core.sweep",
    "loopax.core.block_sweep",
    "loopax.core.slot_sweep",
    "loopax.core.replay_lowering",
    "loopax.core.linear_loop",
    "loopax.core.division",
    "loopax.core.choice",
    "loopax.core.linearize",
    "loopax.core.replay_jvp",
    "loopax.core.linear_replay",
    "loopax.core.replay_linearize",
    "loopax.core.remat",
    "loopax.core.lanes",
    "loopax.core.lanes_loop",
    "loopax.core.lanes_replay",
    "loopax.core.batch",
    "loopax.core.gather",
    "loopax.core.groups",
    "loopax.core.compact_loop",
    "loopax.core.compact_linearize",
    "loopax.core.compact_replay",
    "loopax.core.batching",
    "loopax.core.replay_batching",
    "loopax.core.cut",
    "loopax.core.free",
    "loopax.core.queue",
    "loopax.core",
    "loopax._nnx_places",
    "loopax._nnx",
    "loopax._nnx_changes",
    "loopax._written_rows",
    "loopax._checks",
    "loopax._rows",
    "loopax._drawing",
    "loopax._displays",
    "loopax.progress",
    "loopax.kinds",
    "loopax.lanes",
    "loopax._arguments",
    "loopax._limits",
    "loopax._lengths",
    "loopax._tracing",
    "loopax.buffers",
    "loopax.history",
    "loopax.loops",
    "loopax._rollout",
    "loopax._exchange",
    "loopax._program",
    "loopax._timing",
    "loopax.rewrite",
    "loopax.mapping",
    "loopax._lane_axes",
    "loopax._dealing",
    "loopax._devices",
    "loopax.sharding",
    "loopax.models",
    "loopax.report",
    "loopax.insight.unfolding",
    "loopax.insight.fusion",
    "loopax.insight.memory",
    "loopax.insight.loops",
    "loopax.insight.storing",
    "loopax.insight.sizes",
    "loopax.insight.advice",
    "loopax.insight.explanation",
    "loopax.insight.showing",
    "loopax.insight.subject",
    "loopax.insight.explain",
    "loopax.insight.exchange",
    "loopax.insight.comparison",
    "loopax.insight.compare",
    "loopax.insight",
    "loopax.durable.errors",
    "loopax.durable.orbax",
    "loopax.durable.hosts",
    "loopax.durable.directory",
    "loopax.durable.checksum",
    "loopax.durable.indices",
    "loopax.durable.row_plan",
    "loopax.durable.described",
    "loopax.durable.pieces",
    "loopax.durable.zarr",
    "loopax.durable.rows",
    "loopax.durable.writer",
    "loopax.durable.saves",
    "loopax.durable.callbacks",
    "loopax.durable.equations",
    "loopax.durable.wording",
    "loopax.durable.program",
    "loopax.durable.first_format",
    "loopax.durable.chunk",
    "loopax.durable.output_arrays",
    "loopax.durable.identity",
    "loopax.durable.interrupts",
    "loopax.durable.pace",
    "loopax.durable.arguments",
    "loopax.durable.run",
    "loopax.durable.showing",
    "loopax.durable.job",
    "loopax.durable.loops",
    "loopax.durable",
    "loopax.stochtrace.probes",
    "loopax.stochtrace.operators",
    "loopax.stochtrace.products",
    "loopax.stochtrace.estimator",
    "loopax.stochtrace.budget",
    "loopax.stochtrace.elimination",
    "loopax.stochtrace.lapack",
    "loopax.stochtrace.inverses",
    "loopax.stochtrace.hutchinson",
    "loopax.stochtrace.sketch",
    "loopax.stochtrace.growth",
    "loopax.stochtrace.basis",
    "loopax.stochtrace.hutchpp",
    "loopax.stochtrace.xtrace",
    "loopax.stochtrace.xnystrace",
    "loopax.stochtrace.estimate",
    "loopax.stochtrace",
    "loopax._public",
    "loopax",
    "loopax.command.hlo",
    "loopax.command.table",
    "loopax.command.versions",
    "loopax.command.settings",
    "loopax.command.blas",
    "loopax.command.selftest",
    "loopax.command.copies",
    "loopax.command.doctor",
    "loopax.command.measure",
    "loopax.command.peers",
    "loopax.command.programs",
    "loopax.command.bench",
    "loopax.command.volley",
    "loopax.command.demo",
    "loopax.command",
    "loopax.__main__",
]


def modules():
    found = [info.name for info in pkgutil.walk_packages(loopax.__path__, "loopax.")]
    return ["loopax", *found]


def imported(name):
    """The modules of loopax that a module imports."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "loopax":
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (full if full in LAYERS else node.module for full in inner)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "loopax")


def test_every_module_has_a_layer():
    assert sorted(modules()) == sorted(LAYERS)


@pytest.mark.parametrize("name", LAYERS)
def test_imports_point_down(name):
    below = LAYERS[: LAYERS.index(name)]
    assert [other for other in imported(name) if other not in below] == []


@pytest.mark.parametrize("name", LAYERS)
def test_private_jax_stands_in_one_file(name):
    if name == "loopax._compat":
        return
    source = Path(importlib.import_module(name).__file__ or "").read_text()
    assert "jax._src" not in source


def test_all_is_complete():
    public = {name for name, value in vars(_public).items() if not name.startswith("_") and not _is_module(value)}
    assert public == set(loopax.__all__)
    assert {*public, "durable", "stochtrace"} <= set(dir(loopax))
    assert all(getattr(loopax, name) is getattr(_public, name) for name in public)
    assert list(loopax.__all__) == sorted(loopax.__all__)


def _is_module(value):
    return type(value).__name__ == "module"


def test_everything_public_says_where_it_lives():
    for name in loopax.__all__:
        assert getattr(loopax, name).__doc__
