"""The texts of errors: what happened, where, what was got and expected, what to do."""

from collections.abc import Sequence
from typing import Any


def effects_message(effects: Sequence[Any]) -> str:
    """A loop with such effects is differentiated."""
    names = ", ".join(sorted({type(effect).__name__ for effect in effects}))
    return (
        f"a loop is differentiated whose body has effects that a derivative may neither repeat nor drop: {names}. "
        "Ordered effects and `io_callback` are refused, because reverse mode evaluates steps again. "
        "Use `jax.debug.print` or `jax.debug.callback` without `ordered=True`, or `jax.pure_callback`, "
        "or keep the loop out of the differentiated part with `jax.lax.stop_gradient` on all its inputs."
    )


def ordered_lanes_message(primitive: Any) -> str:
    """A batched loop whose lanes stop at different steps has an ordered effect with results."""
    return (
        f"the body of a loop calls an ordered `{primitive}` with results, and its lanes take different numbers of "
        "steps. JAX has no order between lanes. Leave out `ordered=True`, or let one lane run after another: "
        '`lanes="sequential"`.'
    )


def mixed_effect_message(primitive: Any) -> str:
    """A batched loop whose lanes stop at different steps has a rule that prints and mixes lanes."""
    return (
        f"the body of a loop calls a `{primitive}` that prints or calls back, and computes with several lanes at once; "
        "the lanes of the loop take different numbers of steps. Print outside of it, give all lanes the same number "
        "of steps, or mask inside the body."
    )


def collective_message(axis_name: Any) -> str:
    """A batched loop whose lanes stop at different steps communicates over the batch."""
    return _collective_message(
        axis_name,
        "its lanes take different numbers of steps: a lane that has finished has nothing to contribute. Give all lanes "
        "the same number of steps and mask inside the body",
    )


def sequential_collective_message(axis_name: Any) -> str:
    """A batched loop whose lanes run one after another communicates over the batch."""
    return _collective_message(
        axis_name,
        "its lanes run one after another: the others have nothing to contribute yet. Give all lanes the same number of "
        'steps and write lanes="lockstep"',
    )


def _collective_message(axis_name: Any, why: str) -> str:
    return (
        f"the body of a loop communicates over the mapped axis {axis_name!r} (`jax.lax.psum` or the like), but {why}, "
        "or move the collective out of the loop. A lane's own place (`jax.lax.axis_index`) can be taken in the body "
        "itself, but not in a `jit` or `cond` there."
    )


def devices_message(collective: str, axis: Any) -> str:
    """A loop of which devices take different numbers of steps communicates between them."""
    return (
        f"the body of a loop communicates over the axis {axis!r} of a `jax.shard_map` (`{collective}`), but the "
        "devices along it take different numbers of steps: one that has finished would keep the others waiting for "
        "ever. Give all of them the same number of steps and mask inside the body, or move the collective out of the "
        "loop. If they do take the same number, say so to JAX: decide on it by what does not vary, such as the result "
        f"of `jax.lax.pmax(..., {axis!r})`."
    )


def sharded_lanes_message(mesh_axis: Any) -> str:
    """Lanes that leave their batch are spread over devices in JAX's types, and take different numbers of steps."""
    name = mesh_axis[0] if isinstance(mesh_axis, tuple) and len(mesh_axis) == 1 else mesh_axis
    return (
        "the lanes of a loop with lanes='compact' or 'sequential' take different numbers of steps, and are spread over "
        f"the devices along the `Explicit` mesh axis {name!r}. Gathering them would move them between devices. Use "
        f"`loopax.sharded_lanes(f, mesh, {name!r})` in place of `jax.vmap(f)`: each device then runs a loop of its "
        "own. Or leave lanes='lockstep', which asks all devices in every step whether a lane goes on."
    )


def kind_needs_bound(kind: Any) -> str:
    """A loop without a bound is of a kind that needs one."""
    return f"kind={kind!r} needs to know at most how many steps there are. {_GIVE_BOUND}"


_GIVE_BOUND = "Give a static bound: `max_steps=`, rows of `xs`, or a static length."


def plan_needs_bound(kind: Any, plan: Any) -> str:
    """A kind that says that it needs no bound has a plan that does."""
    return (
        f"kind={kind!r}: `plan` returned {plan!r}, which stores something for every step, and the loop has no bound. "
        f"Set `needs_bound = True` in the class, or return `Checkpoints` where `loop.bound` is None. {_GIVE_BOUND}"
    )


def no_plan(kind: Any, got: Any) -> str:
    """A kind has returned something else than a plan."""
    return (
        f"kind={kind!r}: `plan` returned {_value(got)}, expected a plan: an object of `Checkpoints`, `EveryCarry`, "
        "`EveryResidual`, `LastCarry` or `NoReverseMode` of `loopax.kinds`."
    )


def no_outcome(derivative: Any, got: Any) -> str:
    """A derivative has returned something else than the results of a loop."""
    return (
        f"derivative={derivative!r}: `run` returned {_value(got) if got is None else type(got).__name__}, expected the "
        "results of the loop: what `call.run()` returns, with another carry or other rows perhaps "
        "(`out._replace(carry=[...])`)."
    )


def other_outcome(derivative: Any, lines: Sequence[str]) -> str:
    """A derivative has returned results of other types."""
    return (
        f"derivative={derivative!r}: `run` must return results of the same shapes and dtypes as `call.run()`. It does "
        "not, at:\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\nValues do not depend on a derivative: return every array of the loop, with its type (`x.astype(...)`)."
    )


def unhashable(choice: Any) -> str:
    """JAX keeps kinds and derivatives among the keys of its caches."""
    return (
        f"{choice!r} cannot be hashed, and JAX uses it as a key of its caches. Write `@dataclass(frozen=True)` "
        "above the class."
    )


def _value(got: Any) -> str:
    if got is None:
        return "None"
    return f"the class {got.__name__}" if isinstance(got, type) else f"{type(got).__name__} {got!r}"


def free_form_message(loops: int) -> str:
    """A loop with free lanes has no inner loop, or several."""
    return (
        f"lanes='free' is for a loop whose body holds one inner loop, and this body holds {_found(loops)} The form it "
        "needs: in the body, outside of `cond`, `scan`, `jax.checkpoint` and other loops, one call of "
        "`loopax.while_loop`, `loopax.fori_loop` or `loopax.scan` that is not batched itself; before and after it, "
        "anything. Make one loop of several, or leave lanes='lockstep'."
    )


FREE_NEEDS_BOUNDS = (
    "lanes='free' makes one loop of two, and this kind needs a static bound on its steps, which are those "
    "of both. Give `max_steps=` to both loops, or choose `Checkpointed()`, which needs none."
)


SPARSE_CARRY = (
    "jax.experimental.sparse.sparsify: a sparse matrix is in the carry, the rows or the results of a loop, which hold "
    "dense arrays. Let the body close over the matrix, or return it as it came; or convert it before the loop, or in "
    "the body: `jax.experimental.sparse.todense(x)`."
)


SPARSE_IN_COMPACT_LANES = (
    "jax.experimental.sparse.sparsify: the body of a loop with compact lanes closes over a sparse matrix, and the loop "
    "is batched already. Take `jax.vmap` outside: `jax.vmap(sparsify(f))`, or leave lanes='lockstep'."
)


REVERSE_TWICE_NEEDS_BOUND = (
    "reverse mode is taken twice through a loop that has no bound, and whose body calls a `jax.custom_vjp` function. "
    "Its backward function is not linear in the cotangent (it clips it, say). So the second derivative needs the "
    "cotangents of all steps, and memory for a static number of them. Give `max_steps=`, or take forward mode of the "
    "gradient, which needs no bound: `jax.jvp(jax.grad(f), ...)`, `jax.jacfwd(jax.grad(f))`."
)


CUT_LOOP_SHOWS_NOTHING = (
    "a loop with progress= stands in the body of a loop with lanes='free', or in the function of `lanes_map`. It is "
    "taken apart there, step by step, and cannot show how far it is. Leave its progress= out; a loop with lanes='free' "
    "can show its own."
)


def untraceable_message(caller: str, name: str, error: Exception) -> str:
    """JAX cannot trace the function that `rewrite_loops`, `explain` or `compare` is given."""
    return (
        f"{caller}({name}): the function cannot be traced by JAX, and only what is traced has loops to look at. It "
        "uses the value of an array where Python has to decide something (an `if`, a shape, a conversion to NumPy). "
        "Give what it decides by as a Python number, which stays one, or rewrite the part of it that is pure JAX. JAX "
        f"says:\n{error}"
    )


def rewritten_limit_problem(max_steps: int | None) -> str:
    """A loop in someone's function is longer than the bound given to `rewrite_loops`."""
    return (
        f"max_steps={max_steps} stopped a loop in the function that would have gone on. Give a larger max_steps, or "
        "none: reverse mode works without one, for kind='checkpointed' and 'auto'."
    )


def lanes_map_message(loops: int) -> str:
    """The function of `lanes_map` has no loop, or several."""
    return f"{_one_loop('lanes_map', loops)}, or use `jax.lax.map(f, xs, batch_size=...)`, which needs no loop."


def lanes_stream_message(loops: int) -> str:
    """The function of `lanes_stream` has no loop, or several."""
    return f"{_one_loop('lanes_stream', loops)}. Items without a loop need no lanes: `jax.vmap` takes as long for each."


def no_reverse_mode_message() -> str:
    """JAX cannot tell the values of a step from its tangents."""
    return (
        "reverse mode through a loop whose body calls an operation that has none in JAX. A function of "
        "`jax.custom_batching.custom_vmap` has one in the gradient of a batch, "
        "`jax.grad(lambda x: jax.vmap(f)(x).sum())`, and none in a batch of gradients, `jax.vmap(jax.grad(f))`: give "
        "it a `jax.custom_vjp` there."
    )


def mixed_items_message(caller: str, primitive: str) -> str:
    """An item's result would depend on the items that happen to be in other lanes."""
    return (
        f"{caller}(f, ...): f calls {primitive}, which computes for a lane from other lanes, so an item's result would "
        "depend on which items are in other lanes. (JAX draws for all lanes of a batch with the key of one, where keys "
        "are of the PRNGs rbg and unsafe_rbg. The rule of a jax.custom_batching.custom_vmap may do so, too.) Draw with "
        "keys of threefry (`jax.random.key(seed, impl='threefry2x32')`), or use `jax.lax.map(f, xs)`, which takes one "
        "item after another."
    )


def _one_loop(caller: str, loops: int) -> str:
    return (
        f"{caller}(f, ...): f must hold exactly one loop of loopax, and holds {_found(loops)} The form it needs: "
        "outside of `cond`, `scan`, `jax.checkpoint` and other loops, one call of `loopax.while_loop`, "
        "`loopax.fori_loop` or `loopax.scan`; before and after it, anything. Make one loop of several"
    )


def _found(loops: int) -> str:
    """How many loops a function holds. One that nobody uses has been removed by then."""
    return f"{loops}." if loops else "none. (A loop does not count if its results are not used: return them.)"


def symbolic_lanes_message(size: Any) -> str:
    """A batch whose size is a symbolic dimension of `jax.export`, and lanes that need a number."""
    return (
        f"lanes='compact' or 'sequential': the batch has {size} lanes, a symbolic dimension. How these lanes run is "
        "decided when the loop is compiled, so the number of lanes has to be known. Export a fixed size, or leave "
        "lanes='lockstep'."
    )


def inverse_message(what: str) -> str:
    """Why a kind with an inverse is refused."""
    return (
        f"{what} does not take a kind that brings an inverse. Choose another kind, such as `Checkpointed()`, or write "
        "the loop as a while_loop, fori_loop or scan of its own."
    )


def derivative_message(what: str, derivative: object) -> str:
    """Why another derivative than the loop's is refused."""
    return (
        f"{what} does not take derivative={derivative!r}. Leave the derivative out, or leave the lanes in lockstep or "
        "compact."
    )


def references_message(where: str, why: str) -> str:
    """Why a body that changes mutable arrays is refused."""
    return f"{where} reads or writes a mutable array (a `jax.Ref`), which {why}. Pass its value through the carry."
