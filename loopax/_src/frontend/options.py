"""What users may pass to a loop, and the errors for what they may not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import keystr, tree_leaves_with_path

from loopax._src.core.finite import Finite
from loopax._src.core.ir.lanes import Free, Lanes, LanesLike, to_lanes
from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.frontend.references import refuse_references_in
from loopax._src.jax_internals import made_with
from loopax._src.kinds import Derivative, DerivativeLike, Kind, KindLike, to_derivative, to_kind
from loopax._src.progress import Progress, ProgressLike, Reporter, to_progress
from loopax._src.pytrees.leaves import LoopInfo, describe, describe_node, is_static, stays
from loopax._src.pytrees.match_carry import NO_RETURN
from loopax._src.pytrees.static import (
    Why,
    an_int,
    int_within,
    is_bool,
    refuse_arrays,
    refuse_tracers,
    static_bool,
    two_ways,
)

# Where a number of steps goes that is known only at run time.
_TRACED_STEPS = {
    "while_loop": "`while_loop(lambda c: (c[0] < n) & ..., ..., max_steps=64)`",
    "fori_loop": "`fori_loop(0, n, ..., max_steps=64)`",
    "scan": "`scan(..., length=n, max_steps=64)`",
    "rollout": "`rollout(..., length=n, max_steps=64)`",
    "rewrite_loops": "`rewrite_loops(fn, max_steps=64)(n)`",
}
_GIVE_BOUND = "give a static bound, and let the number itself be traced: "
_UNROLL = Why("how many steps stand in the program", "choose one for all calls: results do not depend on it")
_THROW = Why(
    "whether the program holds a check that raises",
    "give throw=False and info=True, and use `limit_reached`, which is traced",
)
_FINITE = Why("what the program looks at after each step", "give finite=True in all calls")
_INFO = Why("the structure of what is returned", "give info=True in all calls, and leave out what is not wanted")


class CommonOptions(TypedDict, total=False):
    """The options of all loops, durable ones too, as users write them, for type checkers, apart from `info`."""

    max_steps: int | None
    key: Array | None
    throw: bool
    progress: ProgressLike
    finite: Finite | None


class LoopOptions(CommonOptions, total=False):
    """The options of `while_loop`, `fori_loop` and `scan`."""

    kind: KindLike
    derivative: DerivativeLike
    lanes: LanesLike


@dataclass(frozen=True)
class Options:
    """The validated options that all loops share."""

    name: str
    kind: Kind
    lanes: Lanes
    progress: Progress | None = None
    max_steps: int | None = None
    key_data: Any = None
    key_impl: Any = None
    throw: bool = True  # whether what goes wrong when the loop runs is an error
    info: bool = False
    derivative: Derivative | None = None
    finite: Finite | None = None

    @property
    def key_spec(self) -> Any:
        """What tracing a step depends on."""
        return self.key_data is not None, self.key_impl

    @property
    def extras(self) -> list[Any]:
        """The key as an operand of the loop, last of the extra operands."""
        return [] if self.key_data is None else [self.key_data]

    def reporter(self, function: Any) -> Reporter | None:
        """Who shows how far a loop of this function is."""
        return None if self.progress is None else Reporter.of(self.progress, self.name, function)

    def step_key(self, number: Any, extras: Sequence[Any]) -> dict[str, Any]:
        """The keyword arguments of the body at this step."""
        if self.key_data is None:
            return {}
        key = extras[-1]
        if self.key_impl is not None:
            key = jax.random.wrap_key_data(key, impl=self.key_impl)
        return {"key": made_with(extras[-1], jax.random.fold_in(key, number))}

    def with_info(self, result: Any, numbers: LoopInfo) -> Any:
        """What the user gets."""
        return (result, numbers) if self.info else result


def options(
    name: str,
    kind: KindLike,
    lanes: LanesLike,
    key: Any = None,
    progress: ProgressLike = None,
    max_steps: Any = None,
    throw: Any = True,
    info: Any = False,
    derivative: DerivativeLike = None,
    finite: Any = None,
) -> Options:
    """Validate the options that all loops share."""
    data, impl = prng_key(name, key)
    throw = static_bool(f"{name}(throw=...)", throw, _THROW)
    info = static_bool(f"{name}(info=...)", info, _INFO)
    shown, kind, lanes = to_progress(name, progress), to_kind(kind), to_lanes(lanes)
    derivative = to_derivative(derivative)
    if derivative is not None and isinstance(lanes, Free):
        raise NotImplementedError(
            f"{name}(lanes='free') does not take derivative={derivative!r}. Leave the derivative out, or leave the "
            "lanes in lockstep or compact."
        )
    if derivative is not None and not derivative.uses_kind and not kind._chooses:
        raise ValueError(
            f"{name}(kind={kind!r}, derivative={derivative!r}): this derivative differentiates no steps, so there is "
            "nothing of them to store. Leave the kind out."
        )
    if max_steps is not None:
        why = Why("for how many steps memory is set aside", _GIVE_BOUND + _TRACED_STEPS[name])
        refuse_arrays(f"{name}(max_steps=...)", max_steps, "a Python int", why)
        max_steps = int_within(f"{name}(max_steps=...)", max_steps, 0, MOST_STEPS)
    return Options(name, kind, lanes, shown, max_steps, data, impl, throw, info, derivative, to_finite(name, finite))


def to_finite(name: str, finite: Any) -> Finite | None:
    """What breaks a step."""
    refuse_arrays(f"{name}(finite=...)", finite, "None, True or 'nan'", _FINITE)
    if finite is None or finite is True or (isinstance(finite, str) and finite == "nan"):
        return finite
    raise ValueError(
        f"{name}(finite=...): got {finite!r}. Give True to end the loop before a step that makes a NaN or an infinity, "
        "'nan' to allow infinities, or None to look at nothing."
    )


def prng_key(name: str, key: Any) -> tuple[Any, Any]:
    """The data and the implementation of a PRNG key (None: a plain array), or an error for what is none."""
    if key is None:
        return None, None
    key = jnp.asarray(key) if isinstance(key, np.ndarray) else key
    if isinstance(key, jax.Array):
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
            return jax.random.key_data(key), jax.random.key_impl(key)
        if key.dtype == jnp.uint32 and key.shape == jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape:
            return key, None
    raise TypeError(
        f"{name}(key=...): got {describe(key)}, expected one PRNG key. Make one with `jax.random.key(seed)`, "
        "or take one of several with `keys[0]`."
    )


def check_callable(what: str, function: Any) -> None:
    """Refuse what cannot be called."""
    if not callable(function):
        raise TypeError(f"{what}: got {describe(function)}, expected a callable (a function).")


def is_traced_int(what: str, value: Any) -> bool:
    """Whether a number of steps is known only at run time; an error where it is not one integer."""
    if not isinstance(value, jax.Array):
        an_int(what, value)
        return False
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{what}: got {describe(value)}, expected one integer.")
    return True


def one_bool(what: str, value: Any) -> Any:
    """The result of a condition."""
    problem = f"{what} must return one bool (a scalar of dtype bool). Got "
    if value is None:
        raise TypeError(f"{problem}None. {NO_RETURN}")
    if isinstance(value, bool):
        return jnp.asarray(value)
    leaves = jax.tree.leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        raise TypeError(f"{problem}a pytree of structure {jax.tree.structure(value)}. Combine them with `&` or `|`.")
    if is_static(value) or jnp.result_type(value) != jnp.bool_ or jnp.shape(value) != ():
        raise TypeError(
            f"{problem}{describe(value)}. Compare (`x > 0`) to get a bool, and reduce an array with "
            "`jnp.any` or `jnp.all`."
        )
    return jnp.asarray(value)


class Words(NamedTuple):
    """What a scan is called in the errors of the function that the user called."""

    name: str  # of that function
    f: str  # its argument for the body
    xs: str  # its argument for rows
    ys: str  # what it returns rows of
    carry: str = "carry"  # the first of the pair that the body returns
    y: str = "y"  # the second

    @property
    def where(self) -> str:
        """The user's function."""
        return f"{self.f} of {self.name}"


SCAN = Words("scan", "f", "xs", "ys")


def pair(words: Words, result: Any) -> tuple[Any, Any]:
    """What the body of a scan returned."""
    if not isinstance(result, tuple | list) or len(result) != 2:
        advice = NO_RETURN if result is None else f"Return ({words.carry}, None) for no outputs."
        raise TypeError(
            f"{words.where} must return a pair ({words.carry}, {words.y}). Got {describe_node(result)}. {advice}"
        )
    carry, y = result
    return carry, y


def no_capacity(words: Words, what: str, otherwise: str) -> ValueError:
    """The error of a scan without a static number of rows that has something to write to them."""
    steps = _TRACED_STEPS[words.name.removeprefix("durable.")]
    bound = f"{_GIVE_BOUND}{steps} (rows of {what} that are not executed are zero)"
    ways = two_ways("a `length` that is a Python int", bound)
    return ValueError(
        f"{words.name} has no static capacity for {what}: {words.xs} has no arrays, `length` is not static, and there "
        "is no `max_steps`. How many rows there are is a shape, so it must be known when the program is traced. "
        f"{ways}\nWhere no rows are wanted, {otherwise}."
    )


def rows_of(words: Words, xs: Any) -> int | None:
    """The number of rows of xs, which all arrays in it must share; None without arrays."""
    refuse_references_in(f"{words.name}({words.xs}=...)", xs, "Give its value (`ref[...]`).")
    pairs = zip(tree_leaves_with_path(xs), stays(xs), strict=True)
    leaves = [(keystr(path) or f"{words.xs} itself", leaf) for (path, leaf), is_kept in pairs if not is_kept]
    if scalars := [f"  {path}: {describe(leaf)}" for path, leaf in leaves if jnp.ndim(leaf) == 0]:
        raise ValueError(
            f"{words.name} reads {words.xs} row by row, so every array in it needs a leading axis. These have none:\n"
            + "\n".join(scalars)
            + "\nClose over values that are the same at every step instead."
        )
    counts = {jnp.shape(leaf)[0] for _, leaf in leaves}
    if len(counts) > 1:
        raise ValueError(
            f"{words.name} needs as many rows in every array of {words.xs}. Got:\n"
            + "\n".join(f"  {path}: {jnp.shape(leaf)[0]} rows ({describe(leaf)})" for path, leaf in leaves)
        )
    if not counts:
        return None
    (rows,) = counts
    if not isinstance(rows, int):
        raise NotImplementedError(
            f"{words.name}: {words.xs} has {rows} rows, a symbolic dimension. How much a gradient stores depends on "
            f"the number of rows, so it has to be known when the loop is traced. Pad {words.xs} to as many rows as "
            "there may be, and give the length at run time as length=."
        )
    return rows


def unroll_steps(name: str, unroll: Any, static_length: int | None, stops: bool) -> int:
    """Steps per iteration of the compiled loop."""
    refuse_tracers(f"{name}(unroll=...)", unroll, "a Python int or bool", _UNROLL)
    unroll = bool(unroll) if is_bool(unroll) else unroll
    if unroll is None or unroll is False:
        return 1
    steps = 0 if unroll is True else an_int(f"{name}(unroll=...)", unroll)
    if steps == 0:  # as for `jax.lax.scan`, the same as True
        if static_length is None:
            ways = two_ways("limits or a `length` that are Python ints", "give unroll=k to take k steps at a time")
            raise ValueError(
                f"{name}(unroll={unroll!r}) unrolls the whole loop, so its number of steps must be known when the "
                f"program is traced. It is known only at run time here. {ways}"
            )
        steps = max(static_length, 1)
    if steps < 1:
        raise ValueError(f"{name}(unroll=...): got {steps}, expected a positive int, a bool, or 0, which means True.")
    if steps > 1 and stops:
        raise ValueError(
            f"{name}(unroll={unroll!r}, stop=...): steps cannot be taken several at a time where `stop` is asked after "
            "each. Leave one of them out."
        )
    return steps


def limit_message(name: str, max_steps: int | None) -> str:
    """`max_steps` stopped a loop, which is known when it is called."""
    return f"loopax.{name}: {limit_problem(max_steps)}"


def limit_problem(max_steps: int | None) -> str:
    """`max_steps` stopped a loop."""
    return (
        f"max_steps={max_steps} stopped a loop that would have gone on. "
        "Give a larger max_steps, or none; or throw=False (with info=True), if the call takes it, to accept what there "
        "is."
    )


OUT_OF_KEYS = (
    f"with key=, a loop without max_steps may take at most {MOST_STEPS - 1} steps, and it took more. Give max_steps=, "
    "or split the loop and its key in two."
)
