"""Every program of the table compiles for every device: `make accelerators`."""

import os
from functools import partial

import pytest

from benchmarks.accelerators.compilers import TARGETS, compiled, mesh_of
from benchmarks.accelerators.programs import programs

PROGRAMS = {one.name: one for one in programs() if one.is_quick or os.environ.get("ALL")}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_compiles(name, target):
    program, mesh = PROGRAMS[name], mesh_of(TARGETS[target]) if PROGRAMS[name].on_mesh else None
    function = program.function if mesh is None else partial(program.function, mesh)
    assert "ENTRY" in compiled(TARGETS[target], function, *program.arguments, mesh=mesh).text
