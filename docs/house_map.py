"""Draw the map of the house from the imports, and list its rooms, for how-it-works.md: `make map`.

The picture is a layered drawing. A room stands below all rooms that import it, and a
room that none imports right above those that it imports, so that no layer is wide. An
arrow that crosses layers passes through a way point in each. The order in a layer, and
then the positions, are pulled towards the rooms that arrows lead to and come from.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from docs.diagrams import WIDTH, arrow, box, svg, text
from tests.support.rooms import FILES, SOURCE, imports_of_rooms

HERE = Path(__file__).parent
PICTURE = HERE / "pictures" / "house.svg"
PAGE = HERE / "how-it-works.md"

TOP = "public"  # it imports what users call
GROUND = [  # all may import these: arrows to them would hide the others
    "core/jaxpr",
    "pytrees",
    "extras",
    "jax_internals",
]
ROW, BOX, BAR = 54, 26, 60
GAP, SLOT = 7, 8  # between boxes; the width of a way point
ROUNDS = 40


class Arrow(NamedTuple):
    """From a room to one that it imports, through a way point in each layer."""

    points: list[str]


class Drawing(NamedTuple):
    """Where everything stands."""

    layers: list[list[str]]
    arrows: list[Arrow]
    x: dict[str, float]
    folders: set[str]

    def y(self, layer: int) -> float:
        """The upper edge of the boxes of a layer."""
        return ROW * layer + 84


# ---- what to draw


def drawn_imports() -> dict[str, set[str]]:
    """The imports among rooms, without those that follow from others and the ground."""
    hidden = {TOP, *GROUND}
    every = {
        room: others - hidden
        for room, others in imports_of_rooms().items()
        if room not in hidden
    }

    @cache
    def reached(room: str) -> frozenset[str]:
        return frozenset(every[room]).union(*map(reached, every[room]))

    return {
        room: {
            other
            for other in others
            if not any(other in reached(between) for between in others)
        }
        for room, others in every.items()
    }


def depths(imports: Mapping[str, set[str]]) -> dict[str, int]:
    """The layer of each room: one below the lowest room that imports it, if one does."""
    importers = {room: {r for r in imports if room in imports[r]} for room in imports}

    @cache
    def depth(room: str) -> int:
        return 1 + max(map(depth, importers[room]), default=-1)

    @cache
    def lowest(room: str) -> int:
        if importers[room] or not imports[room]:
            return depth(room)
        return min(map(depth, imports[room])) - 1

    return {room: lowest(room) for room in imports}


def layered(imports: Mapping[str, set[str]]) -> tuple[list[list[str]], list[Arrow]]:
    """Rooms and way points by layer, and the arrows through them."""
    depth = depths(imports)
    layers: list[list[str]] = [[] for _ in range(1 + max(depth.values()))]
    for room in sorted(imports):
        layers[depth[room]].append(room)
    arrows = []
    for room in sorted(imports):
        for other in sorted(imports[room]):
            between = range(depth[room] + 1, depth[other])
            points = [f"{room} > {other} : {layer}" for layer in between]
            for layer, point in zip(between, points, strict=True):
                layers[layer].append(point)
            arrows.append(Arrow([room, *points, other]))
    return layers, arrows


# ---- where it stands


def is_point(node: str) -> bool:
    """Whether it is a way point, and no room."""
    return " > " in node


def label(room: str) -> str:
    """What stands in a box."""
    is_folder = (SOURCE / room / "__init__.py").is_file()
    return f"{room}/" if is_folder else f"{room}.py"


def width(node: str) -> float:
    """The width of a box."""
    return SLOT if is_point(node) else 6.2 * len(label(node)) + 9


def neighbours(arrows: Iterable[Arrow]) -> dict[str, list[str]]:
    """What is next to each node on an arrow."""
    found: dict[str, list[str]] = {}
    for way in arrows:
        for a, b in pairwise(way.points):
            found.setdefault(a, []).append(b)
            found.setdefault(b, []).append(a)
    return found


def placed(layers: list[list[str]], arrows: list[Arrow]) -> dict[str, float]:
    """The middle of each node: near its neighbours, and apart from others of its layer."""
    near = neighbours(arrows)
    x = {node: place for layer in layers for node, place in spread(layer).items()}
    for round_ in range(ROUNDS):
        for layer in layers if round_ % 2 == 0 else layers[::-1]:
            wanted = {n: mean(x[m] for m in near.get(n, [n])) for n in layer}
            if round_ < ROUNDS // 2:  # later the order stays
                layer.sort(key=lambda node: (wanted[node], node))
            x.update(apart(layer, wanted))
    return x


def spread(layer: list[str]) -> dict[str, float]:
    """Evenly over the width."""
    step = WIDTH / (len(layer) + 1)
    return {node: step * (place + 1) for place, node in enumerate(layer)}


def mean(values: Iterable[float]) -> float:
    """The mean."""
    given = list(values)
    return sum(given) / len(given)


def apart(layer: list[str], wanted: Mapping[str, float]) -> dict[str, float]:
    """As near to the wanted places as the widths of the others permit."""
    from_left, from_right = {}, {}
    edge = 0.0
    for node in layer:
        from_left[node] = max(wanted[node], edge + width(node) / 2)
        edge = from_left[node] + width(node) / 2 + GAP
    edge = float(WIDTH)
    for node in reversed(layer):
        from_right[node] = min(wanted[node], edge - width(node) / 2)
        edge = from_right[node] - width(node) / 2 - GAP
    return inside(layer, {n: (from_left[n] + from_right[n]) / 2 for n in layer})


def inside(layer: list[str], x: dict[str, float]) -> dict[str, float]:
    """Move nodes so that none stands beyond the edges of the picture or on its neighbour."""
    edge = 4.0
    for node in layer:
        x[node] = max(x[node], edge + width(node) / 2)
        edge = x[node] + width(node) / 2 + GAP
    edge = WIDTH - 4.0
    for node in reversed(layer):
        x[node] = min(x[node], edge - width(node) / 2)
        edge = x[node] - width(node) / 2 - GAP
    return x


def drawing() -> Drawing:
    """The map."""
    layers, arrows = layered(drawn_imports())
    folders = {
        room
        for layer in layers
        for room in layer
        if (SOURCE / room / "__init__.py").is_file()
    }
    return Drawing(layers, arrows, placed(layers, arrows), folders)


# ---- how it looks


def picture() -> str:
    """The map as SVG."""
    house = drawing()
    ground = house.y(len(house.layers)) - 10
    helpers = map(label, GROUND)
    return svg(
        round(ground + BAR + 2),
        [
            *bar(2, "what users import", public_names()),
            *arrows_of(house),
            *boxes_of(house),
            *bar(ground, "helpers, to which no arrows are drawn", helpers),
        ],
    )


def public_names() -> list[str]:
    """What stands beside `_src`."""
    beside = SOURCE.parent
    inits = [file.parent for file in beside.glob("*/__init__.py")]
    names = sorted(file.stem for file in [*inits, *beside.glob("*.py")])
    public = [f"loopax.{name}" for name in names if not name.startswith("_")]
    return ["loopax", *public, "python -m loopax"]


def bar(y: float, title: str, names: Iterable[str]) -> Iterable[str]:
    """A room as wide as the house, with two lines of names."""
    yield f'<rect class="bar" x="2" y="{y:.0f}" width="{WIDTH - 4}" height="{BAR}" rx="6"/>'
    yield text(WIDTH / 2, y + 17, title)
    for place, line in enumerate(halves(list(names))):
        named = "\u2003".join(map(escape, line))
        yield text(WIDTH / 2, y + 35 + 16 * place, named, kind="name")


def halves(names: list[str]) -> tuple[list[str], list[str]]:
    """Split where both lines are about as long."""
    lengths = list(accumulate(map(len, names)))
    first = sum(2 * length <= lengths[-1] + 6 for length in lengths)
    return names[:first], names[first:]


def boxes_of(house: Drawing) -> Iterable[str]:
    """The rooms; those of the core are filled."""
    for number, layer in enumerate(house.layers):
        for node in layer:
            if is_point(node):
                continue
            kind = "body" if node.split("/")[0] == "core" else "box"
            left, top = house.x[node] - width(node) / 2, house.y(number)
            yield box(round(left), top, round(width(node)), BOX, kind)
            name = "name small" if node in house.folders else "small"
            yield text(round(house.x[node]), top + 17, escape(label(node)), kind=name)


def arrows_of(house: Drawing) -> Iterable[str]:
    """The arrows, each from the lower edge of a box to the upper edge of another."""
    leaving, entering = ports(house, 0, 1), ports(house, -1, -2)
    layer_of = {
        node: number for number, layer in enumerate(house.layers) for node in layer
    }
    for way in house.arrows:
        start, *points, end = way.points
        key = tuple(way.points)
        path = [f"M{leaving[key]:.0f} {house.y(layer_of[start]) + BOX:.0f}"]
        x, y = leaving[key], house.y(layer_of[start]) + BOX
        for node in (*points, end):
            to = entering[key] if node == end else house.x[node]
            top = house.y(layer_of[node]) - (2 if node == end else 0)
            half = (y + top) / 2
            path.append(f"C{x:.0f} {half:.0f} {to:.0f} {half:.0f} {to:.0f} {top:.0f}")
            x, y = to, top + BOX
            if node != end:
                path.append(f"V{y:.0f}")
        yield arrow("".join(path))


def ports(house: Drawing, this: int, next_: int) -> dict[tuple[str, ...], float]:
    """Where each arrow touches its box: side by side, in the order of where it goes."""
    found = {}
    rooms = {way.points[this] for way in house.arrows}
    for room in rooms:
        touching = [way for way in house.arrows if way.points[this] == room]
        touching.sort(key=lambda way: (house.x[way.points[next_]], way.points))
        step = min(12, 0.8 * width(room) / len(touching))
        left = house.x[room] - step * (len(touching) - 1) / 2
        found |= {
            tuple(way.points): left + step * place for place, way in enumerate(touching)
        }
    return found


# ---- what each room is for


def summary(file: Path) -> str:
    """The first sentence of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def table() -> str:
    """All folders, and the files beside them, each with what it is for."""
    folders = sorted(
        {file.parent for file in FILES} - {SOURCE}, key=lambda folder: folder.parts
    )
    files = [f for f in FILES if f.parent == SOURCE and f.stem != "__init__"]
    return "\n".join(
        ["| in `loopax/_src` | what it is for |", "|---|---|"]
        + [
            f"| `{folder.relative_to(SOURCE).as_posix()}/` "
            f"| {summary(folder / '__init__.py')} |"
            for folder in folders
        ]
        + [f"| `{file.name}` | {summary(file)} |" for file in files]
    )


TABLE = re.compile(
    r"(?<=<!-- rooms, written by `make map` -->\n\n).*?(?=\n\n<!-- end of rooms -->)",
    re.DOTALL,
)


def main() -> None:
    """Write the picture, and the table into the page."""
    PICTURE.write_text(picture())
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text()))


if __name__ == "__main__":
    main()
