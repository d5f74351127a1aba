"""Which pages the search of the site lists first."""

from typing import Any

BOOSTS = {
    "kinds.md": 3.0,
    "errors.md": 1.5,
    "static-and-dynamic.md": 1.5,
    "lanes.md": 1.5,
    "start.md": 0.5,
    "index.md": 0.5,
    "benchmark.md": 0.3,
    "references.md": 0.3,
}


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Give the page its place, as its front matter would; pages stay readable where they are not a site."""
    del kwargs
    if page.file.src_uri in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[page.file.src_uri]}
    return markdown
