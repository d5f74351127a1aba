"""Programs in PyTorch and Dr.Jit, as in `comparison_programs`.

No lock has these two. To run what is skipped: `pip install torch==2.13.0 drjit==1.5.0`; Dr.Jit needs LLVM as a shared
library.
"""

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from tests.project import comparison_programs as programs

POINT, SLOPE, CURVATURE = 2.0, 32.0, 48.0  # of x⁴
STEPS = 4


def torch() -> Any:
    return importlib.import_module("torch")


def drjit() -> Any:
    return importlib.import_module("drjit")


def has_llvm() -> bool:
    return bool(drjit().has_backend(drjit().JitBackend.LLVM))


def derivative(mode: str, row: str) -> str:
    if row == "loopax":
        return programs.derivative(mode, row)
    if row.startswith("PyTorch "):
        with warnings.catch_warnings():  # of its own code
            warnings.simplefilter("ignore")
            return torch_derivative(mode, row.removeprefix("PyTorch "))
    if mode == "rev/rev":
        return programs.YES if drjit_has_second() else programs.NO
    options = {"Dr.Jit symbolic": {"max_iterations": 8}, "Dr.Jit evaluated": {"mode": "evaluated"}}[row]
    return word(drjit_power(mode, **options)[1][0], SLOPE)


def word(found: float, expected: float) -> str:
    return programs.YES if abs(found - expected) < 1e-3 else programs.WRONG


def torch_power(name: str, x: Any) -> Any:
    if name == "scan":
        step = lambda y, _: (y * x, y.clone())
        return torch()._higher_order_ops.scan(step, x * 0 + 1, torch().ones(STEPS))[0]
    body = lambda y, x: (y * x, x.clone())
    return torch().while_loop(lambda y, _: y < 10, body, (x * 0 + 1, x))[0]


def torch_derivative(mode: str, name: str) -> str:
    x = torch().tensor(POINT, requires_grad=mode != "forward")
    if mode == "forward":
        forward = torch().autograd.forward_ad
        with forward.dual_level():
            result = torch_power(name, forward.make_dual(x, torch().ones(())))
            tangent = forward.unpack_dual(result).tangent
        return programs.NO if tangent is None else word(float(tangent), SLOPE)
    (slope,) = torch().autograd.grad(torch_power(name, x), x, create_graph=mode == "rev/rev")
    if mode == "reverse":
        return word(float(slope), SLOPE)
    (curvature,) = torch().autograd.grad(slope, x)
    return word(float(curvature), CURVATURE)


def slopes_of_a_weight(name: str, requires_grad: bool) -> tuple[float, float]:
    """The derivative of three steps, and that of a Python loop."""
    weight = torch().tensor(0.7, requires_grad=True)
    first = torch().tensor(0.3, requires_grad=requires_grad)
    sin = torch().sin  # a body is traced, and this does not go through an import
    step = lambda y: sin(weight * y + 1.0)
    if name == "scan":
        rows = torch().zeros(3)
        last = torch()._higher_order_ops.scan(lambda y, _: (step(y), y.clone()), first, rows)[0]
    else:
        body = lambda y, i: (step(y), i + 1)
        last = torch().while_loop(lambda _, i: i < 3, body, (first, torch().tensor(0)))[0]
    found, expected = (torch().autograd.grad(y, weight)[0] for y in (last, step(step(step(first)))))
    return float(found), float(expected)


def slopes_of_a_recurrence() -> tuple[Any, Any]:
    """The derivatives of y = a y + b by its factors, by an associative scan and by a Python loop."""
    factors = torch().linspace(0.5, 0.9, 5).requires_grad_()
    terms = torch().linspace(-1.0, 1.0, 5)
    combine = lambda left, right: (left[0] * right[0], right[1] + right[0] * left[1])
    scan = torch()._higher_order_ops.associative_scan
    found = scan(combine, (factors, terms), 0, combine_mode="generic")[1]
    expected = [torch().zeros(())]
    for factor, term in zip(factors, terms, strict=True):
        expected.append(factor * expected[-1] + term)
    return tuple(torch().autograd.grad(y.sum(), factors)[0] for y in (found, torch().stack(expected)))


def batch(name: str) -> Any:
    return torch().func.vmap(lambda x: torch_power(name, x))(torch().tensor([2.0, 3.0]))


def drjit_float(*numbers: float) -> Any:
    """An array that takes part in derivatives."""
    x = importlib.import_module("drjit.llvm.ad").Float(list(numbers))
    drjit().enable_grad(x)
    return x


def drjit_power(of: str, lanes: Sequence[float] = (POINT,), **options: Any) -> tuple[list[float], list[float]]:
    """The values, and their derivatives."""
    x = drjit_float(*lanes)
    body = lambda y, x: (y * x, x)
    y = drjit().while_loop((x * 0 + 1, x), lambda y, _: y < 10, body, **options)[0]
    if of == "forward":
        drjit().forward(x)
    else:
        drjit().backward(y)
    return list(y), list((y if of == "forward" else x).grad)


def drjit_has_second() -> bool:
    """Whether a gradient can be differentiated again."""
    x = drjit_float(POINT)
    drjit().backward(x * x * x)
    return bool(drjit().grad_enabled(x.grad))


def drjit_roots(**options: Any) -> Any:
    """The gradient of the page's example."""
    x = drjit_float(1.0, 5.0)
    body = lambda x, total: (x - 1, total + drjit().sqrt(x))
    total = drjit().while_loop((x, x * 0), lambda x, _: x >= 1, body, **options)[1]
    drjit().backward(total)
    return list(x.grad)
