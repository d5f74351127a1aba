"""Where two pytrees differ in what is not an array: values that stay what they are, and structures."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import jax
import numpy as np
from jax.tree_util import FlattenedIndexKey, KeyPath, PyTreeDef, keystr, tree_flatten_with_path

Describe = Callable[[Any], str]  # a leaf in the words of an error message


def differences(
    old: Any, new: Any, describe: Describe, path: KeyPath = (), *, root: str = "the carry itself"
) -> Iterator[str]:
    """A line for each place where the structure of `new` is not that of `old`, from the root down."""
    name = keystr(path) or root
    if _is_leaf(old) and _is_leaf(new):
        return
    if type(old) is not type(new):
        yield f"{name}: got {_node_text(new, describe)}, expected {_node_text(old, describe)}"
        return
    olds, news = _children(old), _children(new)
    other_data = not same_structure(_one_level(old), _one_level(new))
    if other_data and any(isinstance(key, FlattenedIndexKey) for key in olds):  # children without names
        yield _data_difference(name, old, new)
        return
    if other_data and olds.keys() == news.keys():
        yield from _static_differences(name, old, new, path)
    for key, child in olds.items():
        if key in news:
            yield from differences(child, news[key], describe, (*path, key))
        else:
            yield f"{keystr((*path, key))}: {_node_text(child, describe)} is missing from the result"
    for key, child in news.items():
        if key not in olds:
            yield f"{keystr((*path, key))}: {_node_text(child, describe)} is new in the result"


def same_value(a: Any, b: Any) -> bool:
    """Whether two values that are not arrays are known to be the same, and no step could tell one from the other.

    Python's `==` knows less: `0.0 == -0.0` and `1 == True`, and NaN is not equal to itself.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return _same_content(a, b)
    except Exception:  # noqa: BLE001 - a user's __eq__ may raise anything, and then the values are not known equal
        return False


def _same_content(a: Any, b: Any) -> bool:
    """Whether two values of one type are the same; numbers may stand anywhere in containers."""
    if isinstance(a, np.ndarray | np.generic):
        same_type = a.dtype == b.dtype and a.shape == b.shape
        return same_type and (all(map(same_value, a.flat, b.flat)) if a.dtype == object else a.tobytes() == b.tobytes())
    if isinstance(a, Number):
        return repr(a) == repr(b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, PyTreeDef):
        return same_structure(a, b)
    if dataclasses.is_dataclass(a) and not isinstance(a, type) and a.__dataclass_params__.eq:  # pyright: ignore
        fields = [field.name for field in dataclasses.fields(a) if field.compare]
        return all(same_value(getattr(a, name), getattr(b, name)) for name in fields)
    return bool(a == b)


def same_structure(a: Any, b: Any) -> bool:
    """Whether two structures of pytrees have the same containers and the same static data, by `same_value`."""
    data_a, data_b = a.node_data(), b.node_data()
    if data_a is None or data_b is None:  # a leaf
        return data_a is data_b
    children_a, children_b = a.children(), b.children()
    return (
        data_a[0] is data_b[0]
        and len(children_a) == len(children_b)
        and same_value(data_a[1], data_b[1])
        and all(map(same_structure, children_a, children_b))
    )


def _static_differences(name: str, old: Any, new: Any, path: KeyPath) -> Iterator[str]:
    """What differs in the parts of a node that are not pytrees: static fields, or other data of its class."""
    children = {keystr((key,)) for key in _children(old)}
    fields = [f".{field.name}" for field in dataclasses.fields(old)] if dataclasses.is_dataclass(old) else []
    values = [(field, getattr(old, field[1:], None), getattr(new, field[1:], None)) for field in fields]
    lines = [
        f"{keystr(path)}{field}: got {b!r}, expected {a!r} (a static field)"
        for field, a, b in values
        if field not in children and not same_value(a, b)
    ]
    yield from lines or [_data_difference(name, old, new)]


def _data_difference(name: str, old: Any, new: Any) -> str:
    (_, a), (_, b) = (_one_level(node).node_data() for node in (old, new))
    return f"{name}: got {type(new).__name__} with the static data {b!r}, expected {a!r}"


def _children(node: Any) -> dict[Any, Any]:
    return {path[0]: child for path, child in tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]}


def _one_level(node: Any) -> Any:
    """The structure of a node whose children count as leaves."""
    return jax.tree.structure(node, is_leaf=lambda x: x is not node)


def _is_leaf(node: Any) -> bool:
    return jax.tree_util.all_leaves([node])


def _node_text(node: Any, describe: Describe) -> str:
    if node is None:
        return "None"
    return describe(node) if _is_leaf(node) else type(node).__name__
