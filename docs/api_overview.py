"""List every public name in the overview of the reference, with its first line: `make map`."""

import re
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent / "api"
OVERVIEW = PAGES / "index.md"
CONFIGURATION = PAGES.parents[1] / "mkdocs.yml"
BEGINNING = """# API

Every public name. `import loopax as lx` gives them as `lx.name`, `lx.durable.name` and `lx.stochtrace.name`. Import
`loopax.kinds`, `loopax.schedule` and `loopax.insight` by their names.
"""


def pages() -> list[str]:
    """Those of the reference, in the order of the navigation."""
    return re.findall(r"- api/(?!index\b)([\w-]+)\.md", CONFIGURATION.read_text())


def names(page: str) -> list[str]:
    """What a page documents, such as `loopax.durable.scan`."""
    return re.findall(r"^::: (\S+)$", (PAGES / f"{page}.md").read_text(), re.MULTILINE)


def found(name: str) -> Any:
    """What has this name."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def overview() -> str:
    """The page: a table for each page of the reference."""
    parts = [BEGINNING]
    for page in pages():
        title, *_ = (PAGES / f"{page}.md").read_text().splitlines()
        rows = []
        for name in names(page):
            line, *_ = (getdoc(found(name)) or "").splitlines()
            short = name.removeprefix("loopax.")
            rows.append(f"| [`{short}`]({page}.md#{name}) | {line} |\n")
        heading = f"## [{title.removeprefix('# ')}]({page}.md)"
        parts.append(f"{heading}\n\n| | |\n|---|---|\n{''.join(rows)}")
    return "\n".join(parts)


if __name__ == "__main__":
    OVERVIEW.write_text(overview())
