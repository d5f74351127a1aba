"""Draw the diagrams of how-it-works.md: what a step reads and writes, and lanes that have finished."""

from collections.abc import Iterable

from docs.figures import rules

CLASSES = """
.name{font-weight:bold}
.small{font-size:11.5px}
.on-blue{fill:var(--paper)}
.box{fill:none;stroke:var(--blue)}
.body{fill:var(--blue);fill-opacity:.12;stroke:var(--blue)}
.full{fill:var(--blue)}
.row{fill:var(--orange);fill-opacity:.45;stroke:var(--blue)}
.bar{fill:var(--orange);fill-opacity:.2;stroke:var(--orange)}
.idle{fill:var(--orange);fill-opacity:.12;stroke:var(--orange);stroke-dasharray:4 3}
.arrow{fill:none;stroke:var(--blue);stroke-width:1.6}
.head{fill:var(--blue)}
.empty{fill:var(--pale)}
.kept{stroke:var(--silver);stroke-width:3}
.forward{stroke:var(--blue);stroke-width:2}
.back{stroke:var(--red);stroke-width:2}
"""
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" \
viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" text-anchor="middle">
  <style>{rules}{classes}</style>
  <defs>
    <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" \
markerHeight="6" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker>
  </defs>"""
WIDTH = 480


def svg(height: float, parts: Iterable[str]) -> str:
    """A diagram, as wide as the other figures, that follows the colours of the page."""
    head = HEAD.format(width=WIDTH, height=height, rules=rules(), classes=CLASSES)
    return "\n".join([head, *(f"  {part}" for part in parts), "</svg>\n"])


def text(
    x: float, y: float, words: str, *, anchor: str = "middle", kind: str = ""
) -> str:
    """A line of text; `kind` is one of the classes."""
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' text-anchor="{anchor}"' if anchor != "middle" else ""
    return f'<text x="{x:g}" y="{y:g}"{attributes}>{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle with round corners."""
    size = f'width="{width:g}" height="{height:g}" rx="{min(6, height / 7):.3g}"'
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size}/>'


def arrow(path: str) -> str:
    """A line with a head at its end."""
    return f'<path class="arrow" d="{path}" marker-end="url(#head)"/>'


def loop() -> str:
    """What a step reads and writes."""
    of_xs = ["box", "box", "row", "box", "box"]
    of_ys = ["body", "body", "row", "box", "box"]
    return svg(
        236,
        [
            arrow("M240 42V82"),
            arrow("M144 118H180"),
            arrow("M298 118H334"),
            arrow("M264 152C264 202 216 202 216 155"),
            box(184, 84, 112, 68, "body"),
            text(240, 114, "body", kind="name"),
            text(240, 133, "one step, row i"),
            text(240, 18, "constants", kind="name"),
            text(240, 35, "read whole, the same at every step"),
            text(240, 212, "carry", kind="name"),
            text(240, 229, "given from step to step; a bool in it may stop the loop"),
            *(box(78, 64 + 22 * i, 62, 20, kind) for i, kind in enumerate(of_xs)),
            *(box(340, 64 + 22 * i, 62, 20, kind) for i, kind in enumerate(of_ys)),
            text(109, 54, "xs", kind="name"),
            text(72, 115, "a row", anchor="end"),
            text(72, 130, "read", anchor="end"),
            text(371, 54, "ys", kind="name"),
            text(410, 115, "a row", anchor="start"),
            text(410, 130, "written", anchor="start"),
        ],
    )


def inactive_lanes() -> str:
    """Lanes of 6, 2 and 4 steps in lockstep: what each evaluates the body with."""
    parts = [text(130 + 62 * step, 16, f"step {step}") for step in range(6)]
    for lane, steps in enumerate((6, 2, 4)):
        top = 26 + 42 * lane
        parts.append(text(92, top + 21, f"lane {lane}: {steps} steps", anchor="end"))
        for step in range(6):
            is_active = step < steps
            parts += [
                box(100 + 62 * step, top, 60, 34, "full" if is_active else "idle"),
                text(
                    130 + 62 * step,
                    top + 21,
                    "own state" if is_active else "lane 0",
                    kind="on-blue" if is_active else "",
                ),
            ]
    below = [
        "A lane that has finished evaluates the body where lane 0 is,",
        "and drops the result. Its own carry stays, its rows of ys are zero.",
    ]
    parts += [
        text(6, 172 + 17 * i, line, anchor="start") for i, line in enumerate(below)
    ]
    return svg(198, parts)
