"""How many steps each loop of a compiled program takes: counted on the CPU, where the same program is run."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import jax
from jax import lax
from jax.experimental import io_callback

_NAME = "numbered"
_NUMBER = re.compile(rf"{_NAME}(\d+)")


@contextmanager
def numbered(taken: Counter[int] | None = None) -> Iterator[None]:
    """Number all loops that are traced here, in the names of their operations; and count their steps in `taken`."""
    numbers, while_loop = count(), lax.while_loop

    def loop(cond_fun: Callable[..., Any], body_fun: Callable[..., Any], init_val: Any) -> Any:
        number = next(numbers)

        def body(val: Any) -> Any:
            if taken is not None:
                io_callback(partial(taken.update, [number]), None)
            with jax.named_scope(f"{_NAME}{number}"):
                return body_fun(val)

        return while_loop(cond_fun, body, init_val)

    with mock.patch.object(lax, "while_loop", loop):
        yield


def number_of(names: Iterator[str]) -> int | None:
    """Which loop it is whose body has operations of these names."""
    found = Counter(int(numbers[-1]) for name in names if (numbers := _NUMBER.findall(name)))
    return found.most_common(1)[0][0] if found else None
