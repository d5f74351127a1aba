"""What importing loopax does, and does not do."""

import subprocess
import sys

import pytest

import loopax
from loopax import __main__ as command

NO_ARRAY = "import jax, loopax; loopax.scan; assert jax.live_arrays() == []; print('no arrays')"
IN_A_TRACE = """
import jax, loopax as lx
with jax.checking_leaks():
    print(jax.jit(lambda x: lx.fori_loop(0, 3, lambda i, x: x + 1, x))(1), lx.rollout.__name__)
"""
BY_SUBMODULE = (
    "import loopax._src.rollout, loopax._src.history, loopax as lx; print(lx.rollout.__name__, lx.History.__name__)"
)
SUBMODULES = """
import loopax as lx
print(lx.schedule.picture.__name__, lx.insight.Advice.__name__, lx.durable.scan.__name__)
"""
LIGHT = """
import sys
from loopax.__main__ import main
try:
    main(sys.argv[1:])
finally:
    assert not {"jax", "equinox", "numpy"} & set(sys.modules)
"""


def printed(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_creates_no_array() -> None:
    assert printed(NO_ARRAY) == "no arrays"


def test_names_are_there_wherever_they_are_used_first() -> None:
    assert printed(IN_A_TRACE) == "4 rollout"
    assert printed(BY_SUBMODULE) == "rollout History"
    assert printed(SUBMODULES) == "picture Advice scan"


def test_help_and_version_do_without_jax() -> None:
    shown = printed(LIGHT, "--help")
    assert all(name in shown for name in command.SUBCOMMANDS)
    assert printed(LIGHT, "--version") == f"loopax {loopax.__version__}"


def test_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'loopax' has no attribute 'scann'"):
        loopax.scann  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", command.SUBCOMMANDS)
def test_help_of_a_subcommand(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([name, "--help"])
    assert f"python -m loopax {name}" in capsys.readouterr().out
