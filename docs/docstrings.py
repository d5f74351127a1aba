"""Docstrings as the reference of the site shows them: NumPy form is written for `help()`, a page has links and lists."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

import griffe

PAGES = Path(__file__).parent


class Docstrings(griffe.Extension):
    """Parameters that share a text become one entry, pages that are named become links."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object as it is collected."""
        del kwargs
        if obj.docstring is None or obj.is_alias:
            return
        obj.docstring.value = linked(
            re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
        )
        obj.docstring.parser = griffe.Parser.numpy
        for section in obj.docstring.parsed:
            if section.kind == griffe.DocstringSectionKind.parameters:
                types = {
                    one.name: str(one.annotation)
                    for one in getattr(obj, "parameters", ())
                }
                section.value = joined(section.value, types)


def linked(text: str) -> str:
    """`docs/kinds.md` becomes a link from the folder `api` to that page, by its title."""
    return re.sub(
        r"docs/([\w-]+)\.md",
        lambda found: f"[{title(found[1])}](../{found[1]}.md)",
        text,
    )


def title(page: str) -> str:
    """The heading of a page."""
    first, *_ = (PAGES / f"{page}.md").read_text().splitlines()
    return first.removeprefix("# ")


def joined(
    parameters: list[griffe.DocstringParameter], types: dict[str, str]
) -> list[griffe.DocstringParameter]:
    """One entry for those that follow each other with the same text."""
    groups = [
        list(group)
        for _, group in groupby(parameters, lambda parameter: parameter.description)
    ]
    return [group[0] if len(group) == 1 else one_of(group, types) for group in groups]


def one_of(
    group: list[griffe.DocstringParameter], types: dict[str, str]
) -> griffe.DocstringParameter:
    """The entry of several; with their type, if they have the same."""
    names = [parameter.name for parameter in group]
    is_common = len({types.get(name) for name in names}) == 1
    return griffe.DocstringParameter(
        ", ".join(names),
        annotation=group[0].annotation if is_common else None,
        description=group[0].description,
        value=None,
    )
