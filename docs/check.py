"""Check the built site.

Links and anchors, pictures and their texts, nothing loaded from elsewhere, every public
name, and on each page the version and the navigation of mkdocs.yml.
"""

import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urldefrag, urlparse

import loopax
import loopax.insight
import loopax.kinds
import loopax.schedule

ROOT = Path(__file__).parent.parent
SITE = ROOT / "site"
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
}
MODULES = (
    loopax,
    loopax.durable,
    loopax.insight,
    loopax.kinds,
    loopax.schedule,
    loopax.stochtrace,
)
# The tabs at the top of each page.
NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
TABS = re.findall(r"^  - (.*):$", NAVIGATION, re.MULTILINE)
# `make docs` says it once it is known.
REPOSITORY = os.environ.get("LOOPAX_REPOSITORY", "")


class Page(HTMLParser):
    """What a page refers to, and what may be referred to in it."""

    def __init__(self, path: Path) -> None:
        """Read it."""
        super().__init__()
        self.path, self.links, self.loads = path, [], []
        self.anchors, self.without_text = {"", "__skip"}, []
        self.texts, self.within, self.repository = {}, "", ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect."""
        given = {name: value or "" for name, value in attrs}
        self.within = given.get("class", "")
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            if "site-repository" in self.within.split():
                self.repository = given["href"]
        if tag in LOADS and LOADS[tag] in given:
            self.loads.append(given[LOADS[tag]])
        if tag == "img" and not given.get("alt", "").strip():
            self.without_text.append(given.get("src", ""))

    def handle_endtag(self, tag: str) -> None:
        """What follows belongs to no class that is asked for."""
        del tag
        self.within = ""

    def handle_data(self, data: str) -> None:
        """Collect what stands right behind the start of a tag, by its class."""
        if data.strip():
            self.texts.setdefault(self.within, []).append(data.strip())


def target(page: Path, link: str) -> Path:
    """The file that a link within the site leads to."""
    base = SITE if link.startswith("/") else page.parent
    path = (base / unquote(link).lstrip("/")).resolve()
    return path / "index.html" if path.is_dir() else path


def problems_of(page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    """What is wrong with a page."""
    yield from problems_of_header(page)
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


def problems_of_header(page: Page) -> Iterator[str]:
    """What is wrong at the top of a page."""
    if page.texts.get("site-version") != [loopax.__version__]:
        yield f"shows another version than {loopax.__version__}"
    if page.repository != REPOSITORY:
        yield f"its link to the repository is {page.repository!r}"
    if page.texts.get("md-tabs__link") != TABS:
        yield "the tabs are not those of mkdocs.yml"


def missing_names(pages: dict[Path, Page]) -> Iterator[str]:
    """Public names that no page of the reference has, or its overview does not lead to."""
    reference = {
        path: page for path, page in pages.items() if SITE / "api" in path.parents
    }
    overview = reference[SITE / "api" / "index.html"]
    places = [
        (path, anchor)
        for path, page in reference.items()
        for anchor in page.anchors
        if page is not overview
    ]
    linked = {
        (target(overview.path, url), anchor)
        for url, anchor in map(urldefrag, overview.links)
    }
    for module in MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                continue
            if module is loopax.insight and getattr(loopax, name, None) is value:
                continue  # it stands there as loopax.Comparison
            full = f"{module.__name__}.{name}"
            found = [place for place in places if place[1] == full]
            if len(found) != 1:
                yield f"on {len(found)} pages of the reference: {full}"
            elif found[0] not in linked:
                yield f"not in the overview: {full}"


def main() -> None:
    """Say what is wrong, if anything is."""
    pages = {
        path: Page(path)
        for path in sorted(SITE.rglob("*.html"))
        if path.name != "404.html"
    }
    found = {path: list(problems_of(page, pages)) for path, page in pages.items()}
    found[SITE / "api" / "index.html"] += missing_names(pages)
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
