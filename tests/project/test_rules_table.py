"""The table of rules in `docs/how-it-works.md` says what is registered."""

from typing import Any

import pytest
from jax._src import core
from jax._src.interpreters import ad, batching, mlir, partial_eval, remat
from jax._src.state import discharge

from loopax._src.core.autodiff.sweep_transpose import linear_sweep_p
from loopax._src.core.batching.compact import compact_vmap_p
from loopax._src.core.effects import only_if_p
from loopax._src.core.ir.linear_loop import linear_loop_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.core.ir.reverse_sweep import reverse_sweep_p
from loopax._src.core.jaxpr.types import retyped_p
from loopax._src.core.masking import active_p, fill_inactive_p
from loopax._src.core.row_buffers import VERSION
from loopax._src.jax_internals import keep_bits_p
from tests.project.test_how_it_works import PAGE

GROUPS = [[loop_p, reverse_sweep_p], [compact_vmap_p], [linear_loop_p, linear_sweep_p]]
GROUPS.append([*VERSION, fill_inactive_p, retyped_p, keep_bits_p])
WITHOUT_DERIVATIVES = {active_p: {"primitive_jvps", "primitive_linearizations", "primitive_transposes"}}
WITHOUT_DERIVATIVES[only_if_p] = {"primitive_transposes"}

REGISTERED: dict[str, Any] = {
    "`primitive_jvps`": ad.primitive_jvps.__contains__,
    "`primitive_linearizations`": ad.primitive_linearizations.__contains__,
    "`primitive_transposes`": ad.primitive_transposes.__contains__,
    "`fancy_transposes`": ad.fancy_transposes.__contains__,
    "`custom_partial_eval_rules`": partial_eval.custom_partial_eval_rules.__contains__,
    "`partial_eval_jaxpr_custom_rules`": partial_eval.partial_eval_jaxpr_custom_rules.__contains__,
    "`remat.rules`": remat.rules.__contains__,
    "`dce_rules`": partial_eval.dce_rules.__contains__,
    "lowering": mlir._lowerings.__contains__,
    "batching": lambda p: p in batching.fancy_primitive_batchers or p in batching.primitive_batchers,
    "`custom_typechecks`": core.custom_typechecks.__contains__,
    "discharge rule": discharge._discharge_rules.__contains__,
    "`to_lojax`": lambda p: "to_lojax" in vars(p),
}


def rows() -> dict[str, list[str]]:
    lines = PAGE.read_text().partition("| JAX's name |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: rest for name, *rest in cells}


def test_the_table_has_all_rules() -> None:
    assert list(rows()) == list(REGISTERED)


@pytest.mark.parametrize("name", REGISTERED)
def test_what_is_registered(name: str) -> None:
    cells = rows()[name]
    for said, primitives in zip(cells, GROUPS, strict=True):
        assert {REGISTERED[name](p) for p in primitives} == {said == "yes"}
    reasons = PAGE.read_text().partition("\nWhy not:\n")[2].partition("\n\n`active_lanes`")[0]
    assert ("no" in cells) == (f"\n- {name}: " in reasons)


def test_the_two_without_some_derivatives() -> None:
    for primitive, missing in WITHOUT_DERIVATIVES.items():
        for name in ("primitive_jvps", "primitive_linearizations", "primitive_transposes"):
            assert REGISTERED[f"`{name}`"](primitive) == (name not in missing)
