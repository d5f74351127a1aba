"""Programs on other people's packages, in environments of their own: `make clients` runs them (README.md).

`LOOPAX_CLIENTS` says that this is one of these environments, `small` or `whole`. Elsewhere there is nothing to collect.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from tests.clients.gradients import check_gradient
from tests.clients.missing import missing_here

SIZE = os.environ.get("LOOPAX_CLIENTS", "")
collect_ignore = [client.file for client in missing_here().values()]
collect_ignore_glob = [] if SIZE else ["test_*.py"]

if SIZE:
    # Diffrax reads Equinox's loops when it is imported. How a client promotes shapes and dtypes is its own affair.
    import equinox.internal

    from tests.peers.exchange import equinox_scan, equinox_while_loop

    equinox.internal.while_loop, equinox.internal.scan = equinox_while_loop, equinox_scan
    jax.config.update("jax_numpy_rank_promotion", "allow")
    jax.config.update("jax_numpy_dtype_promotion", "standard")


@pytest.fixture
def check(record_property: Callable[[str, Any], None]) -> Callable[..., None]:
    """`check_gradient`, whose seconds stand in the report."""

    def check(*args: Any, **options: Any) -> None:
        record_property("seconds to compile", check_gradient(*args, **options))

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How long each gradient took to compile."""
    for name, seconds in _recorded(terminalreporter.stats.get("passed", [])):
        terminalreporter.write_line(f"{seconds:6.1f} s to trace and compile the gradient of {name}")


def _recorded(reports: list[Any]) -> Iterator[tuple[str, float]]:
    for report in reports:
        for name, value in getattr(report, "user_properties", ()) if report.when == "call" else ():
            if name == "seconds to compile":
                yield report.nodeid.removeprefix("tests/clients/"), value
