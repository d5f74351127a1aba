"""Print the address of the repository, which the site links to, or nothing while it is not filled in."""

import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"

if __name__ == "__main__":
    address = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["loopax"]["repository"]
    print("" if "OWNER" in address else address)
