"""CONTRIBUTING.md, which stands beside the README, as a page of the site."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

SOURCE = Path(__file__).parent.parent / "CONTRIBUTING.md"
PAGE = "contributing.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the page; its links to pages start in the root of the repository."""
    text = SOURCE.read_text().replace("](docs/", "](")
    files.append(File.generated(config, PAGE, content=text))
    return files


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Let links to the file lead to the page."""
    del kwargs
    return markdown.replace("](../CONTRIBUTING.md", f"]({PAGE}")
