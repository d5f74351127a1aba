"""How many operations a program has of each loop, as XLA is handed it."""

from collections import Counter
from collections.abc import Iterator, Sequence

from loopax._src.core.batching.compact_primitive import compact_vmap_p
from loopax._src.core.ir.loop import loop_p
from loopax._src.frontend.raising import of_user
from loopax._src.insight.find_loops import FoundLoop
from loopax._src.jax_internals import ClosedJaxpr, calls_of_operations, inner_jaxprs, lax_loop, user_lines


def operations(program: ClosedJaxpr, loops: Sequence[FoundLoop]) -> Counter[str]:
    """By the line of the loop whose body they are in, without loops in that; all loops on one line together.

    An operation is that of a loop if a line of the loop's body led to it. What stands on the line of a loop is taken
    for what the loop itself needs, and not counted. Nothing is, where JAX cannot lower the program here.
    """
    every = list(_walk(loops))
    sources = {loop.source for loop in every}
    bodies = [(loop.source, set(_lines(loop.loop.body)) - sources) for loop in every]
    counted: Counter[str] = Counter()
    try:
        found = calls_of_operations(program) if loops else []
    except Exception:  # noqa: BLE001 - whatever JAX and its kernels lack: a mesh, a device, the length of an axis
        found = []
    for calls in found:
        lines = list(map(str, of_user(calls)))  # innermost first
        candidates = [source for source, body in bodies if lines and lines[0] in body]
        # The loops of loopax are among the calls; those of JAX are not.
        counted.update([source for source in candidates if source in lines][:1] or candidates[:1])
    return counted


def _walk(loops: Sequence[FoundLoop]) -> Iterator[FoundLoop]:
    for loop in loops:
        yield loop
        yield from _walk(loop.inner)


def _lines(body: ClosedJaxpr) -> Iterator[str]:
    """Where the equations of a body come from, without those of loops in it."""
    for eqn in body.eqns:
        if eqn.primitive not in (loop_p, compact_vmap_p) and lax_loop(eqn) is None:
            yield from list(map(str, of_user(user_lines(eqn))))[:1]
            for inner in inner_jaxprs(eqn):
                yield from _lines(inner)
