"""A mark on a check, which calls Python where it fails: `jax.export` cannot write that down, and says which it is."""

from typing import Any, NoReturn

from loopax._src.jax_internals import Primitive, is_for_export, register


class Said:
    """A text that is no part of a program: two that differ in a line of the source alone are the same one."""

    def __init__(self, text: str) -> None:
        """Keep it."""
        self.text = text

    def __repr__(self) -> str:
        """Short, for it stands in printed jaxprs."""
        return "check"


unexported_p = Primitive("unexported")


def unexported(failed: Any, said: Said) -> Any:
    """The flag of a check that says this where it fails."""
    return unexported_p.bind(failed, said=said)


def _lowered(ctx: Any, failed: Any, *, said: Said) -> Any:
    if is_for_export(ctx):
        _refuse(said.text)
    return [failed]


def _refuse(text: str) -> NoReturn:
    raise NotImplementedError(
        "jax.export: the program can raise an error when it runs, which calls Python, and JAX exports no callbacks. "
        f"The error is:\n  {text}\nThree ways out:\n"
        "  avoid the check: give an int32 `upper` and a static `lower` from 0 on, or a History a static index;\n"
        "  give throw=False to the loop, with info=True to return `limit_reached`, and unsolved='nan' to Implicit;\n"
        "  export in a process with EQX_ON_ERROR=nan in its environment: where the check fails, results are NaN, and "
        "integers are the largest of their dtype."
    )


register(
    unexported_p,
    impl=lambda failed, *, said: failed,  # noqa: ARG005
    lowering=_lowered,
    abstract_eval=lambda failed, *, said: failed,  # noqa: ARG005
    batch_without_axis=lambda args, axes, *, said: (unexported(args[0], said), axes[0]),
)
