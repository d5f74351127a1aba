"""The recipe for conda-forge of a source distribution, and the address of the folder in which it is published.

`python .ci/conda_recipe.py dist/loopax-1.2.3.tar.gz https://...` prints it.
"""

import sys
import tomllib
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]


def filled(sdist: Path, folder: str) -> str:
    """The recipe with the checksum of this file, the addresses of the project, and its owner as the maintainer."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["loopax"]
    text = (ROOT / "packaging/conda-forge/recipe.yaml").read_text(encoding="utf-8")
    for word, value in {
        "sha256: SHA256": f"sha256: {sha256(sdist.read_bytes()).hexdigest()}",
        ": FOLDER/": f": {folder.rstrip('/')}/",
        ": DOCUMENTATION": f": {project['documentation']}",
        ": REPOSITORY": f": {project['repository']}",
        "- MAINTAINER": f"- {project['repository'].split('/')[-2]}",
    }.items():
        text = text.replace(word, value)
    return text.partition("\n")[2]  # without the line that says what to do


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # pyright: ignore[reportAttributeAccessIssue]
    print(filled(Path(sys.argv[1]), sys.argv[2]), end="")
