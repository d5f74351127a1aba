"""What `explain` says of branches."""

import jax
import jax.numpy as jnp

import loopax as lx


def chosen(p, w, x, **options):
    return lx.cond(p > 0, lambda w, x: jnp.tanh(w @ x), lambda w, x: x, w, x, **options)


def mapped(size, **options):
    program = jax.vmap(lambda p, w, x: chosen(p, w, x, **options), in_axes=(0, None, 0))
    return lx.explain(program, jnp.ones(size), jnp.ones((4, 4)), jnp.ones((size, 4)))


def test_branches_are_listed_as_such() -> None:
    found = lx.explain(chosen, 1.0, jnp.ones((4, 4)), jnp.ones(4))
    assert [loop.branch for loop in found.loops] == ["true_fun", "false_fun"]
    first = found.loops[0]
    assert {leaf.name: leaf.role for leaf in first.leaves} == {
        "operands[0]": "constant",
        "operands[1]": "constant",
        "result": "carried",
    }
    text = str(found)
    assert text.startswith("chosen: 2 branches, gradient")
    assert f"loopax.cond at {first.source}: true_fun" in text
    assert "runs: if it is taken\n" in text
    assert "steps:" not in text


def test_branches_beside_loops() -> None:
    pick = lambda i, x: lx.switch(i % 3, [jnp.sin, jnp.cos, lambda x: x], x)
    found = lx.explain(lambda x: lx.fori_loop(0, 5, pick, x), jnp.ones(2))
    (loop,) = found.loops
    assert (loop.branch, [inner.branch for inner in loop.inner]) == ("", [f"branches[{i}]" for i in range(3)])
    assert str(found).startswith("<lambda>: 1 loop and 3 branches")


def test_what_a_batch_pays() -> None:
    found = mapped(64)
    assert "runs: for all 64 lanes, if one of them takes it" in str(found)
    (warning,) = found.warnings
    assert (warning.name, warning.source) == ("branch-for-all-lanes", found.loops[0].source)
    assert '`cond(..., lanes="compact")`' in warning.message
    assert mapped(8).warnings == ()


def test_compact_lanes_pay_for_their_own() -> None:
    found = mapped(64, lanes="compact")
    assert found.warnings == ()
    assert [loop.branch for loop in found.loops] == ["true_fun", "false_fun"]
    assert "for the lanes that take it (Compact(" in str(found)


def test_for_whom_a_branch_runs() -> None:
    runs = lambda **options: [line.strip() for line in str(mapped(64, **options)).splitlines() if "runs:" in line]
    everybody = "runs: for all 64 lanes, if one of them takes it"
    assert runs() == [everybody, everybody]
    costly, cheap = runs(lanes="compact")
    assert costly.startswith("runs: if it is taken, in a batch for the lanes that take it (Compact())")
    assert cheap == everybody
    assert set(runs(lanes="sequential")) == {"runs: if it is taken, for one lane after another"}
