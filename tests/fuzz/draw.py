"""Random programs, of which each can be run: what loopax or JAX refuses is not drawn, with the reason."""

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.operations import ALWAYS, OF_LEAVES, TAKES_BRANCHES, WITHOUT_FORWARD_MODE
from tests.fuzz.program import KINDS, LANES, ROWS, Program
from tests.fuzz.transformations import AROUND, BATCHES, DERIVATIVES, FORWARD, REVERSE, TRANSFORMATIONS

STORES_EVERY_STEP = ("bounded", "residuals")
FREE_INNER_LOOPS = ("inner_loop", "inner_loop_of_any_length", "inner_while")
OTHER_INNER_LOOPS = ("batch", "slope", "loop_in_checkpoint", *TAKES_BRANCHES)  # a branch is a loop
DROPS_RESULTS = ("overwrite", "window")  # of an inner loop, which is then dead code


@st.composite
def programs(draw: Any) -> Program:
    """One of them."""
    leaves = "".join(sorted(draw(st.sets(st.sampled_from("zfkmbhr"), max_size=2))))
    operations = [*ALWAYS, *(operation for leaf in leaves for operation in OF_LEAVES[leaf])]
    names = [operation.__name__ for operation in operations]
    body = tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=4)))
    loop = draw(st.sampled_from(["scan", "fori", "while"]))
    steps = draw(st.sampled_from([None, None, None, *range(ROWS + 1)]))
    stop = loop != "fori" and draw(st.booleans())
    counted = loop != "while" and steps is not None
    kinds = [kind for kind in KINDS if kind != "lax" or (counted and not stop)]  # `lax` has reverse mode there alone
    kind = draw(st.sampled_from(kinds))
    max_steps = None if kind == "lax" else draw(st.sampled_from([None, None, ROWS + 1, 2, 0]))
    if max_steps is None and kind in STORES_EVERY_STEP and loop != "scan":
        max_steps = ROWS + 2  # these kinds need a static bound
    bounded = loop == "scan" or counted or max_steps is not None
    return Program(
        loop,
        body,
        leaves,
        steps,
        reverse=loop == "scan" and draw(st.booleans()),
        unroll=draw(st.integers(1, 3)) if counted and not stop and max_steps is None else 1,
        stop=stop,
        max_steps=max_steps,
        kind=kind,
        lanes=draw(st.sampled_from(_lanes(body))),
        transformations=draw(_transformations(body, leaves, bounded)),
        seed=draw(st.integers(0, 999)),
    )


def _lanes(body: tuple[str, ...]) -> list[str]:
    """Free lanes are for a body with one inner loop, whose results are used."""
    one = sum(name in FREE_INNER_LOOPS for name in body) == 1 and not set(body) & {*OTHER_INNER_LOOPS, *DROPS_RESULTS}
    return [name for name in LANES if name != "free" or one]


@st.composite
def _transformations(draw: Any, body: tuple[str, ...], leaves: str, bounded: bool) -> tuple[str, ...]:
    """Most programs with branches have lanes, for which they are."""
    names = [*TRANSFORMATIONS, *AROUND]
    reverse_twice = True
    if WITHOUT_FORWARD_MODE & set(body):
        names = [name for name in names if name not in FORWARD]
    if "r" in leaves:  # JAX does not map a derivative whose tangents alone are mapped, where there is a mutable array
        names = [name for name in names if name != "jacfwd"]
        reverse_twice = False  # JAX has no such derivative, also without a loop
    if "squash" in body:  # its gradient is not the sum of those of lanes, where a value is the same in all lanes
        names = [name for name in names if name != "vmap of n"]
        reverse_twice = reverse_twice and bounded  # loopax needs the cotangents of all steps then

    def is_taken(names: tuple[str, ...]) -> bool:
        """Three derivatives in a row take seconds to compile, for JAX's own loops as well: two of them and a batch."""
        in_reverse = sum(name in REVERSE for name in names)
        return sum(name in DERIVATIVES for name in names) <= 2 and (reverse_twice or in_reverse < 2)

    found = draw(st.lists(st.sampled_from(names), max_size=3).map(tuple).filter(is_taken))
    takes_branches = {*body, *found} & {*TAKES_BRANCHES, *AROUND}
    if not takes_branches or BATCHES & set(found) or draw(st.sampled_from([True, False, False])):
        return found
    batch = draw(st.sampled_from([name for name in names if name in BATCHES]))
    place = draw(st.integers(0, len(found)))
    return (*found[:place], batch, *found[place:])
