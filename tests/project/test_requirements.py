"""The lowest versions that pyproject.toml admits are those that `make test-all` tests on."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_lowest_versions_are_those_that_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = re.findall(r"^(\w+)==(.*)$", (ROOT / "requirements-lowest.lock").read_text(), re.MULTILINE)
    assert [d for d in project["dependencies"] if tuple(d.split(">=")) not in pins] == []
