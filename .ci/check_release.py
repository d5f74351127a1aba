"""Refuse a release that is not ready: `python .ci/check_release.py v1.2.3`."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problems(tag: str) -> Iterator[str]:
    """Say what is missing for the release of this tag."""
    if "OWNER" in str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["loopax"]):
        yield "pyproject.toml: [tool.loopax] has OWNER in place of the owner of the repository"
    number = re.escape(tag.removeprefix("v"))
    for path, line in {
        "loopax/_version.py": rf'^__version__ = "{number}"$',
        "CITATION.cff": rf"^version: {number}$",
        "mkdocs.yml": rf"^  release: {number} ",
        "packaging/conda-forge/recipe.yaml": rf'^  version: "{number}"$',
        "CHANGELOG.md": rf"^## {number} \(\d{{4}}-\d{{2}}-\d{{2}}\)$",
    }.items():
        if not re.search(line, (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE):
            yield f"{path}: no line of the form {line}"


if __name__ == "__main__":
    found = list(problems(sys.argv[1]))
    sys.exit("\n".join(found) if found else 0)
