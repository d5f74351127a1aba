"""What `durable.value_and_grad` differentiates: the user's functions, checked, and the types of what they get."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import keystr

from loopax._src.core.jaxpr.util import MOST_STEPS
from loopax._src.durable.chunk import placed
from loopax._src.durable.row_source import RowSource
from loopax._src.durable.stored_program import refuse_unsavable, types_of
from loopax._src.frontend.options import Words, check_callable, one_bool, pair
from loopax._src.frontend.steps import call_user
from loopax._src.loops import scan
from loopax._src.nnx.functional import roots
from loopax._src.pytrees.leaves import Spec, describe, describe_node, pack
from loopax._src.pytrees.static import int_within

NAME = "durable.value_and_grad"
LOOPS = "scan", "fori_loop", "while_loop"
UNBOUNDED_STEPS = 2**62
_WORDS = Words(NAME, "f", "xs", "ys")
_HALF = jnp.float16, jnp.bfloat16


class Question(NamedTuple):
    """The user's functions."""

    loss: Callable[..., Any]
    f: Callable[..., Any]
    loop: str
    cond_fun: Callable[[Any, Any], Any] | None
    is_paired: bool  # whether outputs are paired with cotangents

    @property
    def is_open(self) -> bool:
        """Whether a condition says how many steps there are."""
        return self.loop == "while_loop"

    @property
    def is_counted(self) -> bool:
        """Whether a step is given its number."""
        return self.loop == "fori_loop"

    def checked(self) -> "Question":
        """Check the arguments that do not depend on a call, and return this object."""
        if self.loop not in LOOPS:
            raise ValueError(f"{NAME}(loop=...): got {self.loop!r}, expected one of {', '.join(map(repr, LOOPS))}.")
        check_callable(f"{NAME}(loss)", self.loss)
        check_callable(f"{NAME}(f)", self.f)
        if self.loop == "while_loop":
            check_callable(f"{NAME}(cond_fun=...), which says whether a while_loop goes on", self.cond_fun)
        elif self.cond_fun is not None:
            raise ValueError(
                f"{NAME}(cond_fun=...): only loop='while_loop' has a condition, and this is a {self.loop}."
            )
        if self.is_paired and self.loop != "scan":
            raise ValueError(f"{NAME}(cotangents=...): only loop='scan' has outputs, and this is a {self.loop}.")
        return self

    def step(self, params: Any, carry: Any, x: Any) -> tuple[Any, Any]:
        """As of `scan`; with cotangents, x is a row of xs and one of them."""
        if self.loop == "fori_loop":
            return call_user(f"f of {NAME}", self.f, ["params", "i", "carry"], params, x, carry), None
        if self.loop == "while_loop":
            return call_user(f"f of {NAME}", self.f, ["params", "carry"], params, carry), None
        x, of_y = x
        carry, y = pair(_WORDS, call_user(_WORDS.where, self.f, ["params", "carry", "x"], params, carry, x))
        return carry, _paired(of_y, y) if self.is_paired else y

    def goes_on(self, params: Any, carry: Any) -> Any:
        """The condition of a `while_loop`."""
        where = f"cond_fun of {NAME}"
        return one_bool(where, call_user(where, self.cond_fun, ["params", "carry"], params, carry))

    def number(self, params: Any, carry: Any, total: Any) -> Any:
        """The loss."""
        where, ys = f"loss of {NAME}", [total] if self.loop == "scan" else []
        value = call_user(where, self.loss, ["params", "carry", *["sum_of_ys"] * len(ys)], params, carry, *ys)
        if not (isinstance(value, jax.Array | np.ndarray | np.generic | float) and jnp.ndim(value) == 0):
            raise TypeError(f"{where} must return one real number (a scalar). Got {describe_node(value)}.")
        value = jnp.asarray(value)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{where} must return one real number. Got {describe(value)}.")
        return value

    def steps(self, length: Any, rows: RowSource) -> int:
        """How many there are; -1: nobody knows."""
        if length is not None:
            length = int_within(f"{NAME}(length=...)", length, 0, MOST_STEPS if self.is_counted else UNBOUNDED_STEPS)
        if rows.length is not None and length not in (None, rows.length):
            raise ValueError(f"{NAME}(length={length}): xs and cotangents have {rows.length} rows.")
        if self.is_open:
            return -1
        steps = length if rows.length is None else rows.length
        if steps is None:
            raise ValueError(f"{NAME}(length=...): nothing else says how many steps there are. Give their number.")
        return steps

    def rows(self, xs: Any, cotangents: Any) -> RowSource:
        """Those of xs and of cotangents."""
        if self.loop == "scan":
            return RowSource(NAME, (xs, cotangents))
        if xs is not None:
            raise TypeError(f"{NAME}: xs are the rows of loop='scan', and this is a {self.loop}. Give them in params.")
        return RowSource(NAME, None)


class Problem(NamedTuple):
    """The user's functions, and the pytrees of parameters, of a state and of rows."""

    question: Question
    params: Spec
    state: Spec  # of (carry, sum of ys)
    rows: Spec
    num_xs: int  # of the arrays of rows; those behind are not differentiated
    program: str = ""  # what tells it from others of the same functions, which close over something else


class Given(NamedTuple):
    """What a chunk is given."""

    params: Sequence[Array]
    state: Sequence[Array]  # before it
    rows: Sequence[Array]
    first: Any  # int32: the number of its first step
    most: Any  # int32: its steps, or the most that it may take


def problem_of(question: Question, params: Any, init: Any, rows: RowSource, num_xs: int) -> tuple[Problem, Given]:
    """What is to be differentiated, and what the first step is given but for its row."""
    for what, tree in (("params", params), ("init", init)):
        if roots(tree):
            raise TypeError(
                f"{NAME}: {what} holds NNX objects, which have no gradient of their own. Give "
                "`nnx.split(model)[1]`, and merge it in the body."
            )
    of_params, params_spec = pack(params)
    of_init, init_spec = pack(init)
    found: list[Spec] = []

    def one(of_params: Any, of_init: Any, row: Any) -> Any:
        params = params_spec.unpack(of_params)
        x = jnp.zeros(1, jnp.int32) if question.is_counted else rows.unpack(row)
        length = None if jax.tree.leaves(x) else 1
        carry, ys = scan(lambda carry, x: question.step(params, carry, x), init_spec.unpack(of_init), x, length)
        arrays, spec = pack((carry, jax.tree.map(_sum, ys)))
        found.append(spec)
        return arrays

    types = jax.eval_shape(one, of_params, of_init, rows.types(1))
    refuse_unsavable(NAME, types_of("carry, sum of ys: ", found[-1]))
    zeros = [jnp.zeros(x.shape, x.dtype) for x in types[len(of_init) :]]
    start = [x.astype(t.dtype) for x, t in zip(of_init, types, strict=False)]
    arrays = placed([*of_params, *start, *zeros])
    given = Given(arrays[: len(of_params)], arrays[len(of_params) :], [], np.int32(0), np.int32(1))
    return Problem(question, params_spec, found[-1], rows.spec, num_xs), given


def _sum(ys: Any) -> Any:
    """Of one row; of half precision, in float32."""
    if jnp.issubdtype(ys.dtype, jax.dtypes.extended):
        raise TypeError(f"{NAME}: outputs are added up, and {ys.dtype} cannot be. Keep keys in the carry.")
    return jnp.sum(ys.astype(jnp.float32) if ys.dtype in _HALF else ys, 0)


def _paired(cotangents: Any, ys: Any) -> Any:
    """The sum of the products of cotangents and outputs."""
    is_none = lambda leaf: leaf is None  # noqa: E731, which stands for no cotangent
    problems, products = [], []
    leaves, structure = jax.tree_util.tree_flatten_with_path(cotangents, is_leaf=is_none)
    try:
        outputs = structure.flatten_up_to(ys)
    except ValueError as error:
        problems, outputs = [f"  {error}"], []
    for (path, c), y in zip(leaves, outputs, strict=False):
        if c is None:
            continue
        if jnp.shape(c) == jnp.shape(y):
            products.append(jnp.sum((c * y).real))
        else:
            name = keystr(path) or "the output itself"
            problems.append(f"  {name}: a row of cotangents has shape {jnp.shape(c)}, the output {jnp.shape(y)}")
    if problems:
        raise ValueError(f"{NAME}(cotangents=...): they are not rows of what f returns:\n" + "\n".join(problems))
    return reduce(add, products) if products else jnp.zeros(())
