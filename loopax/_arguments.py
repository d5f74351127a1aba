"""What users may pass to a loop, and the errors for what they may not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from loopax._carry import describe, is_static, stays
from loopax._compat import is_reference
from loopax._static import static_int
from loopax.core.jaxprs import MOST_STEPS
from loopax.kinds import Kind, KindLike, to_kind
from loopax.lanes import Lanes, LanesLike, to_lanes


@dataclass(frozen=True)
class Options:
    """The validated options that all loops share."""

    name: str
    kind: Kind
    lanes: Lanes
    max_steps: int | None
    key_data: Any
    key_impl: Any

    @property
    def key_spec(self) -> Any:
        """What tracing a step depends on."""
        return self.key_data is not None, self.key_impl

    @property
    def extras(self) -> list[Any]:
        """The key as an operand of the loop, last of the extra operands."""
        return [] if self.key_data is None else [self.key_data]

    def step_key(self, number: Any, extras: Sequence[Any]) -> dict[str, Any]:
        """The keyword arguments of the body at this step."""
        if self.key_data is None:
            return {}
        key = extras[-1]
        if self.key_impl is not None:
            key = jax.random.wrap_key_data(key, impl=self.key_impl)
        return {"key": jax.random.fold_in(key, number)}


def options(name: str, kind: KindLike, lanes: LanesLike, key: Any, progress: Any, max_steps: Any) -> Options:
    """Validate the options that all loops share."""
    if progress is not None:
        raise NotImplementedError(
            f"{name}(progress={progress!r}): progress bars are not implemented yet. Leave it None."
        )
    data, impl = prng_key(name, key)
    return Options(name, to_kind(kind), to_lanes(lanes), _max_steps(name, max_steps), data, impl)


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


def _max_steps(name: str, max_steps: Any) -> int | None:
    if max_steps is None:
        return None
    if isinstance(max_steps, jax.Array):
        raise TypeError(
            f"{name}(max_steps=...): got {describe(max_steps)}, expected a Python int. It is a static bound, which "
            "decides how much memory a gradient uses. A number of steps known at run time goes into `length=` of scan, "
            "the bounds of fori_loop or the condition of while_loop."
        )
    steps = static_int(f"{name}(max_steps=...)", max_steps)
    if steps < 0 or steps > MOST_STEPS:
        raise ValueError(f"{name}(max_steps=...): got {steps}, expected an int from 0 to {MOST_STEPS}.")
    return steps


def check_callable(what: str, function: Any) -> None:
    """Refuse what cannot be called."""
    if not callable(function):
        raise TypeError(f"{what}: got {describe(function)}, expected a callable (a function).")


def refuse_references(where: str, values: Sequence[Any]) -> None:
    """Mutable arrays cannot be closed over."""
    if any(is_reference(value) for value in values):
        raise NotImplementedError(
            f"{where} closes over a mutable array (`jax.new_ref`), which loopax's loops do not support: a replay would "
            "write to it again. Pass its value through the carry instead."
        )


def is_traced_int(what: str, value: Any) -> bool:
    """Whether a number of steps is known only at run time; an error where it is not one integer."""
    if not isinstance(value, jax.Array):
        static_int(what, value)
        return False
    if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{what}: got {describe(value)}, expected one integer.")
    return True


def one_bool(what: str, value: Any) -> Any:
    """The result of a condition."""
    problem = f"{what} must return one bool (a scalar of dtype bool). Got "
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
        got = (
            f"a {type(result).__name__} of {len(result)}"
            if isinstance(result, tuple | list)
            else f"{type(result).__name__}"
        )
        raise TypeError(
            f"{words.where} must return a pair ({words.carry}, {words.y}). Got {got}. Return "
            f"({words.carry}, None) for no outputs."
        )
    carry, y = result
    return carry, y


def no_rows(words: Words, y: Any) -> None:
    """Refuse outputs of a scan that has no static number of rows to write them to."""
    if not all(stays(y)):
        raise no_capacity(words, words.ys, f"return ({words.carry}, None) from {words.f}")


def no_capacity(words: Words, what: str, otherwise: str) -> ValueError:
    """The error of a scan without a static number of rows that has something to write to them."""
    return ValueError(
        f"{words.name} has no static capacity for {what}: {words.xs} has no arrays, `length` is not static, and there "
        f"is no `max_steps`. Give max_steps= (rows of {what} that are not executed are zero), or {otherwise}."
    )


def rows_of(words: Words, xs: Any) -> int | None:
    """The number of rows of xs, which all arrays in it must share; None without arrays."""
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
    return _known_rows(words, rows)


def _known_rows(words: Words, rows: Any) -> int:
    """The number of rows, which a symbolic dimension (of `jax.export`) does not tell."""
    if isinstance(rows, int):
        return rows
    raise NotImplementedError(
        f"{words.name}: {words.xs} has {rows} rows, a symbolic dimension. How much a gradient stores depends on the "
        f"number of rows, so it has to be known when the loop is traced. Pad {words.xs} to as many rows as there may "
        "be, and give the length at run time as length=."
    )


def unroll_steps(name: str, unroll: Any, static_length: int | None, stops: bool) -> int:
    """Steps per iteration of the compiled loop."""
    if unroll is None or unroll is False:
        return 1
    steps = 0 if unroll is True else static_int(f"{name}(unroll=...)", unroll)
    if steps == 0:  # as for `jax.lax.scan`, the same as True
        if static_length is None:
            raise ValueError(
                f"{name}(unroll={unroll!r}) unrolls the whole loop, which needs a static number of steps. "
                "It is known only at run time here: give unroll=k to take k steps at a time."
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
    """`max_steps` stopped a loop."""
    return (
        f"loopax.{name}: max_steps={max_steps} stopped a loop that would have gone on. "
        "Give a larger max_steps, or throw=False (with info=True) to accept what there is."
    )


def out_of_keys_message(name: str) -> str:
    """A loop without a bound took more steps than there are keys for."""
    return (
        f"loopax.{name}: with key=, a loop without max_steps may take at most {MOST_STEPS - 1} steps, and it took "
        "more. Give max_steps=, or split the loop and its key in two."
    )
