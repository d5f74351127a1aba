"""Sizes and types in words."""

from typing import Any


def in_bytes(size: float) -> str:
    """A number of bytes, with three digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
        size /= 1024
    raise AssertionError


def typed(aval: Any) -> str:
    """An array's dtype and shape."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
