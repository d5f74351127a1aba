"""The programs of the pages "loopax with ...", each page in a process of its own: as a user has the library."""

import os
import subprocess
import sys

import pytest

from tests.support.pages import ROOT, WITH, python

PAGES = [page for page in sorted(WITH.glob("*.md")) if python(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(page):
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.pages", str(page)]
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
