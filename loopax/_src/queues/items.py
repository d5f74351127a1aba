"""Items of any iterable, fetched and made ready while the device runs."""

import contextvars
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from threading import Condition, Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopax._src.frontend.references import refuse_references_in
from loopax._src.nnx.functional import freeze
from loopax._src.pytrees.leaves import Dynamic, Spec, pack, same_structure, same_value, type_in_words

# The settings of JAX that decide about arrays. They belong to a thread: to the one where a stream is made.
_SETTINGS = {
    "jax_enable_x64": jax.enable_x64,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_default_device": jax.default_device,
    "jax_default_prng_impl": jax.default_prng_impl,
}


def settings_here() -> tuple[Any, ...]:
    """As they are now, in this thread."""
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


@contextmanager
def with_settings(settings: tuple[Any, ...]) -> Iterator[None]:
    """Those of another thread in this one."""
    with ExitStack() as stack:
        for setting, value in zip(_SETTINGS.values(), settings, strict=True):
            stack.enter_context(setting(value))
        yield


_ALIKE = "All items go through one compiled program: give each the structure, shapes and dtypes of the first."


def _array(leaf: Any, of: Dynamic, spec: Spec, place: int, index: int) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    impl = jax.random.key_impl(leaf) if is_key else None
    if impl != of.key_impl:
        kinds = ["no PRNG key" if key is None else f"a PRNG key of {key}" for key in (impl, of.key_impl)]
        raise TypeError(_message(spec, place, index, *kinds))
    # Arrays of JAX do not change; into others, the iterable may write again.
    copied = np.asarray if isinstance(leaf, jax.Array) else np.array
    array = given = copied(jax.random.key_data(leaf) if is_key else leaf)
    if array.dtype.kind in "biufcV":
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
    if array is not given and array.dtype.kind in "iu" and (array != given).any():
        raise OverflowError(_message(spec, place, index, str(given), f"integers that fit into {array.dtype}"))
    if (array.shape, array.dtype) != (of.aval.shape, of.aval.dtype):
        raise TypeError(_message(spec, place, index, type_in_words(array), type_in_words(of.aval)))
    return array


def _message(spec: Spec, place: int, index: int, got: str, expected: str) -> str:
    return f"lanes_stream: item {index}{spec.paths()[place]} is {got}, expected {expected}. {_ALIKE}"


class Items:
    """Items in their order, all like the first. They are fetched ahead in a thread, or, with `ahead=0`, when taken.

    An error of the iterable, or of an item that is not like the others, is kept until all items before it are taken.
    """

    spec: Spec  # from the first item on
    _iterator: Iterator[Any]

    def __init__(self, ahead: int) -> None:
        """Nothing is fetched before the start."""
        self.count = 0  # of items that were fetched
        self.fetched: deque[tuple[int, list[np.ndarray]]] = deque()  # and are not taken
        self.error: BaseException | None = None
        self._ahead, self._changed = ahead, Condition()
        self._ended = self._stopping = False
        self._thread: Thread | None = None

    def start(self, items: Iterable[Any]) -> None:
        """Begin to fetch from here."""
        self._iterator = iter(items)
        if self._ahead:
            # The thread has the context variables and settings of this one.
            fetch = partial(contextvars.copy_context().run, self._fetch_ahead, settings_here())
            self._thread = Thread(target=fetch, name="loopax items", daemon=True)
            self._thread.start()

    def ready(self, index: int, item: Any) -> tuple[int, list[np.ndarray]]:
        """An item's index and arrays; an error where it is not like the others."""
        frozen = freeze(item)
        if not hasattr(self, "spec"):
            refuse_references_in(f"item {index} of lanes_stream", frozen, "Give its value (`ref[...]`).")
            arrays, spec = pack(frozen)
            types = iter([jax.typeof(np.asarray(x)) for x in arrays])  # a Python number is an array like others
            leaves = [replace(leaf, aval=next(types)) if isinstance(leaf, Dynamic) else leaf for leaf in spec.leaves]
            self.spec = Spec(spec.treedef, tuple(leaves))
        spec, (leaves, treedef) = self.spec, jax.tree.flatten(frozen)
        if not same_structure(treedef, spec.treedef):
            what = f"the structure {treedef}, expected {spec.treedef}"
            raise TypeError(f"lanes_stream: item {index} has {what}. {_ALIKE}")
        arrays = []
        for place, (leaf, expected) in enumerate(zip(leaves, spec.leaves, strict=True)):
            if isinstance(expected, Dynamic):
                arrays.append(_array(leaf, expected, spec, place, index))
            elif not same_value(leaf, expected.value):  # a part of the program
                raise ValueError(_message(spec, place, index, repr(leaf), repr(expected.value)))
        return index, arrays

    def take(self, most: int) -> list[Any]:
        """The next items, so many at most: with `ahead=0` all of these, else those that are there."""
        if not self._ahead:
            while len(self.fetched) < most and not self._ended:
                self._fetch_one()
        with self._changed:
            taken = [self.fetched.popleft() for _ in range(min(most, len(self.fetched)))]
            self._changed.notify_all()
        return taken

    def wait(self, seconds: float | None = None) -> None:
        """Until there is an item, or no more will come, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: self.fetched or self._ended or not self._ahead, seconds)

    @property
    def is_empty(self) -> bool:
        """Whether all items are taken."""
        with self._changed:
            return self._ended and not self.fetched

    def raise_error(self) -> None:
        """Raise what the iterable has raised, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def stop(self, wait: bool = True) -> list[Any]:
        """Fetch no more; returns the items that are fetched and not taken. One that is being fetched is waited for."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if wait and self._thread is not None:
            self._thread.join()
        with self._changed:
            self._ended = True
            fetched = list(self.fetched)
            self.fetched.clear()
            self._changed.notify_all()
        return fetched

    def _fetch_ahead(self, settings: tuple[Any, ...]) -> None:
        with with_settings(settings):
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or self._ended or len(self.fetched) < self._ahead)
                    if self._stopping or self._ended:
                        return
                self._fetch_one()

    def _fetch_one(self) -> None:
        try:
            found = [self.ready(self.count, next(self._iterator))]
            self.count += 1
        except StopIteration:
            found = []
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised behind the items before it
            found, self.error = [], error
        with self._changed:
            self.fetched.extend(found)
            self._ended |= not found
            self._changed.notify_all()
