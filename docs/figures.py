"""How the figures of the pages look: legible on a phone, in the colours of the page.

A figure is drawn with the colours that matplotlib has by default. In the SVG they become
variables of CSS, with one value for light pages and one for dark ones. A figure of 5 inches
is 480 CSS pixels wide. On a phone it has 390, so text of 8.5 points is 9 pixels high there:
smaller text is too small.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {
    "axes.edgecolor": "gray",
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.figsize": (5, 3),
    "font.size": 9.5,
    "grid.color": "lightgray",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "savefig.transparent": True,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "loopax",  # the same figure is the same file
    "xtick.color": "gray",
    "xtick.labelcolor": "black",
    "xtick.labelsize": 8.5,
    "ytick.color": "gray",
    "ytick.labelcolor": "black",
    "ytick.labelsize": 8.5,
}


class Colour(NamedTuple):
    """A variable of CSS, and its values on light and on dark pages."""

    name: str
    light: str
    dark: str


# By what matplotlib draws with. The colours of series are far apart for colour-blind
# readers as well, and stand out from the page (3:1 or more).
COLOURS = {
    "#000000": Colour("ink", "#30343b", "#d3d6dc"),
    "#ffffff": Colour("paper", "#ffffff", "#16181d"),
    "#808080": Colour("gray", "#7a808a", "#949aa5"),
    "#7f7f7f": Colour("gray", "#7a808a", "#949aa5"),  # tab:gray
    "#a9a9a9": Colour("silver", "#b4bac4", "#666d79"),  # darkgray
    "#d3d3d3": Colour("pale", "#dcdfe4", "#3a3f49"),  # lightgray
    "#1f77b4": Colour("blue", "#005fa8", "#5aa2f5"),
    "#ff7f0e": Colour("orange", "#cf7d00", "#f2a62c"),
    "#2ca02c": Colour("green", "#12946a", "#6fd9b5"),
    "#d62728": Colour("red", "#b3202c", "#f4544f"),
    "#9467bd": Colour("purple", "#c05fa8", "#d394c8"),
    "#8c564b": Colour("brown", "#4f4238", "#a88f7c"),
    "#17becf": Colour("cyan", "#2f9bd4", "#58cdf2"),
}


# What a browser does not need: metadata, comments, turns by nothing, blanks in front of lines.
CLUTTER = (
    r"<\?xml.*?\?>\s*<!DOCTYPE.*?>\s*",
    r"<metadata>.*?</metadata>",
    r"<!--.*?-->",
    r' transform="rotate\(-0 [^"]*\)"',
    r"(?<=\n)\s+",
)
# Markers that are drawn alike, one after another.
MARKERS = r"<g( clip-path=[^>]*)>\n((?:<use [^>]*/>\n)+)</g>"


def rules() -> str:
    """The variables as CSS. An image asks its page for the scheme."""
    light, dark = (
        "".join(f"--{name}:{value};" for name, value in sorted(values.items()))
        for values in (
            {colour.name: colour.light for colour in COLOURS.values()},
            {colour.name: colour.dark for colour in COLOURS.values()},
        )
    )
    return (
        f":root{{{light}fill:var(--ink)}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    )


def with_scheme(svg: str) -> str:
    """The SVG of matplotlib, with variables for its colours and the reader's own font."""
    for pattern in CLUTTER:
        svg = re.sub(pattern, "", svg, flags=re.DOTALL)
    svg = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", "sans-serif", svg)
    svg = re.sub(r"#[0-9a-f]{6}\b", _variable, svg)
    svg = re.sub(r'(?<= d=")[^"]*', _shorter_path, svg)
    svg = re.sub(r'(?<= [xy]=")[^"]*', lambda found: _shorter(found[0]), svg)
    svg = re.sub(MARKERS, _alike, svg)
    return svg.replace('<style type="text/css">', f"<style>{rules()}", 1)


def _variable(found: re.Match[str]) -> str:
    if found[0] not in COLOURS:
        raise ValueError(f"{found[0]} is drawn in no scheme: see COLOURS in {__file__}")
    return f"var(--{COLOURS[found[0]].name})"


def _alike(found: re.Match[str]) -> str:
    """Markers whose common style stands once, if they have one."""
    clip, markers = found.groups()
    styles = set(re.findall(r' style="[^"]*"', markers))
    if len(styles) != 1:
        return found[0]
    style = styles.pop()
    return f"<g{clip}{style}>\n{markers.replace(style, '')}</g>"


def _shorter(number: str) -> str:
    return f"{float(number):.2f}".rstrip("0").rstrip(".")


def _shorter_path(found: re.Match[str]) -> str:
    """A path with two decimals, and without points in the middle of a level line."""
    parts: list[list[str]] = []
    for command, numbers in re.findall(r"([A-Za-z])([^A-Za-z]*)", found[0]):
        here = [command, *map(_shorter, numbers.split())]
        while (
            command == "L"
            and [part[0] for part in parts[-2:]] in (["L", "L"], ["M", "L"])
            and (parts[-2][2] == parts[-1][2] == here[2])
        ):
            parts.pop()
        parts.append(here)
    return "".join(part[0] + " ".join(part[1:]) for part in parts)


def save(figure: Figure, path: Path) -> None:
    """Write a figure that was drawn with `STYLE`."""
    with mpl.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None})
    give_scheme(path)


def give_scheme(path: Path) -> None:
    """Let an SVG that matplotlib has written follow the colours of the page."""
    path.write_text(with_scheme(path.read_text()))
