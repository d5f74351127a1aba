"""JAX's persistent compilation cache: a second process need not compile the same loops again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support.cached_programs import CHECKED, PROGRAMS

pytestmark = pytest.mark.slow  # two processes that compile

ROOT = Path(__file__).parents[2]
HIT, MISS, NOT_ASKED = [1, 0], [0, 1], [0, 0]
# Until then JAX asked the cache for no program with a callback, and a check that can fail is one.
CALLBACKS_ARE_CACHED = jax.__version_info__ >= (0, 11)

Report = dict[str, tuple[int, int, str]]  # hits, misses, error


@pytest.fixture(scope="module")
def reports(tmp_path_factory: Any) -> tuple[Report, Report]:
    """What a first process reports, and what a second one does that shares its cache."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-W", "error", "-m", "tests.support.cached_programs"]

    def run() -> Report:
        done = subprocess.run(command, check=False, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run(), run()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_second_process_compiles_no_loop_again(reports: Any, program: str) -> None:
    first, second = reports
    assert first[program] == [*MISS, ""]
    assert second[program] == [*HIT, ""]


@pytest.mark.parametrize("program", CHECKED)
def test_a_check_that_can_fail_is_cached_where_jax_caches_callbacks(reports: Any, program: str) -> None:
    """A program from the cache calls back into the process that reads it, not the one that compiled it."""
    for report, asked in zip(reports, (MISS, HIT), strict=True):
        assert report[program][:2] == (asked if CALLBACKS_ARE_CACHED else NOT_ASKED)
        assert "loopax.while_loop at tests/support/cached_programs.py:" in report[program][2]
        assert "(root): max_steps=2 stopped a loop" in report[program][2]
