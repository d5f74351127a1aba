"""What the package tells an index: its addresses, and the README with links that work there.

All addresses follow from `[tool.loopax]` in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).parent


class Addresses(MetadataHookInterface):
    """Fill in the dynamic fields `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both fields to the metadata of the package."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["loopax"]
        files = f"{project['repository']}/blob/main"
        metadata["urls"] = {
            "Documentation": project["documentation"],
            "Source": project["repository"],
            "Issues": f"{project['repository']}/issues",
            "Changelog": f"{files}/CHANGELOG.md",
        }
        text = with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), files)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(markdown: str, files: str) -> str:
    """Let links to files of the repository lead to `files`. Pictures are links to the file itself."""
    raw = files.replace("/blob/", "/raw/")
    markdown = re.sub(r"(!\[[^]]*\])\((?!\w+:|#)([^)]+)\)", rf"\1({raw}/\2)", markdown)
    return re.sub(r"(?<!!)(\[[^]]*\])\((?!\w+:|#)([^)]+)\)", rf"\1({files}/\2)", markdown)
