"""The flags of XLA that `bench --device` compares. XLA reads them once, so each set of flags has processes of its own.

On a GPU the host starts each operation of a step, and waits for the condition of each step. With `WHILE` in
`xla_gpu_enable_command_buffer`, XLA records a whole loop as a graph, which the GPU runs without the host. A `+` adds to
the types that are recorded anyway. XLA records no graph of fewer than five operations, and a small body has fewer, so
that the third set lowers this limit.

XLA of jaxlib 0.10.0, 0.10.2 and 0.12.0 accepts these flags. Where it does not know one, it ends the process, and the
table is reported as failed.
"""

import os
from typing import NamedTuple


class Flags(NamedTuple):
    """A set of flags, and the platforms on which it changes anything."""

    name: str
    xla: tuple[str, ...]
    platforms: tuple[str, ...] = ("gpu",)


DEFAULT = Flags("default", (), ("cpu", "gpu"))
LOOPS_AS_GRAPHS = Flags("+WHILE", ("--xla_gpu_enable_command_buffer=+WHILE",))
SMALL_LOOPS_AS_GRAPHS = Flags("+WHILE, any size", (*LOOPS_AS_GRAPHS.xla, "--xla_gpu_graph_min_graph_size=1"))
ALL = (DEFAULT, LOOPS_AS_GRAPHS, SMALL_LOOPS_AS_GRAPHS)


def environment(flags: Flags, platform: str) -> dict[str, str]:
    """Return the environment of a process that runs with these flags, on a device of this platform."""
    variables = {**os.environ, "XLA_FLAGS": " ".join([*flags_of_user(), *flags.xla])}
    return variables | ({"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {})


def flags_of_user() -> list[str]:
    """Return the flags in XLA_FLAGS, without those that the sets compare: the default is that of XLA."""
    compared = {_name(flag) for flags in ALL for flag in flags.xla}
    return [flag for flag in os.environ.get("XLA_FLAGS", "").split() if _name(flag) not in compared]


def _name(flag: str) -> str:
    return flag.partition("=")[0]
