"""Check the built site: links and anchors, pictures and their texts, nothing loaded from elsewhere, every public name."""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag, urlparse

import loopax
import loopax.kinds
import loopax.schedule

SITE = Path(__file__).parent.parent / "site"
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
}
MODULES = (loopax, loopax.durable, loopax.kinds, loopax.schedule, loopax.stochtrace)


class Page(HTMLParser):
    """What a page refers to, and what may be referred to in it."""

    def __init__(self, path: Path) -> None:
        """Read it."""
        super().__init__()
        self.path, self.links, self.loads = path, [], []
        self.anchors, self.without_text = {"", "__skip"}, []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given:
            self.loads.append(given[LOADS[tag]])
        if tag == "img" and not given.get("alt", "").strip():
            self.without_text.append(given.get("src", ""))


def target(page: Path, link: str) -> Path:
    """The file that a link within the site leads to."""
    base = SITE if link.startswith("/") else page.parent
    path = (base / unquote(link).lstrip("/")).resolve()
    return path / "index.html" if path.is_dir() else path


def problems_of(page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    """What is wrong with a page."""
    yield from (f"a picture without a text: {src}" for src in page.without_text)
    for load in page.loads:
        if urlparse(load).netloc:
            yield f"loads from elsewhere: {load}"
        elif not load.startswith("data:") and not target(page.path, load).exists():
            yield f"no such file: {load}"
    for link in page.links:
        url, anchor = urldefrag(link)
        parsed = urlparse(url)
        if parsed.scheme or parsed.netloc:
            if parsed.scheme not in ("http", "https", "mailto") or not (
                parsed.netloc or parsed.path
            ):
                yield f"no address: {link}"
            continue
        path = target(page.path, url) if url else page.path
        if not path.exists():
            yield f"no such page: {link}"
        elif path in pages and unquote(anchor) not in pages[path].anchors:
            yield f"no such place: {link}"


def missing_names(reference: Page) -> Iterator[str]:
    """Public names that the reference does not have."""
    for module in MODULES:
        names = (
            f"{module.__name__}.{name}"
            for name in module.__all__
            if not isinstance(getattr(module, name), ModuleType)
        )
        yield from (
            f"not in the reference: {name}"
            for name in names
            if name not in reference.anchors
        )


def main() -> None:
    """Say what is wrong, if anything is."""
    pages = {
        path: Page(path)
        for path in sorted(SITE.rglob("*.html"))
        if path.name != "404.html"
    }
    found = {path: list(problems_of(page, pages)) for path, page in pages.items()}
    found[SITE / "api" / "index.html"] += missing_names(
        pages[SITE / "api" / "index.html"]
    )
    for style in SITE.rglob("*.css"):
        elsewhere = "url(http" in style.read_text() or "@import" in style.read_text()
        found[style] = ["loads from elsewhere"] if elsewhere else []
    lines = [
        f"{path.relative_to(SITE)}: {problem}"
        for path, problems in found.items()
        for problem in problems
    ]
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(f"{len(lines)} problems" if lines else 0)


if __name__ == "__main__":
    main()
