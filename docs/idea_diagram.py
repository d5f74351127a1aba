"""Draw the picture of the first page: lanes that do not wait, and a schedule of checkpoints."""

from docs.diagrams import WIDTH, box, svg, text
from loopax import schedule

COUNTS = (12, 1, 2, 3, 2, 5, 1, 4)  # steps of each lane of the batch
LEFT = 8


def idea() -> str:
    """Both halves, one above the other."""
    return svg(500, [*_waiting(), *_leaving(), *_schedule()])


def _title(y: float, words: str) -> str:
    return text(LEFT, y, words, anchor="start", kind="name")


def _waiting() -> list[str]:
    """The batch under `jax.lax`: all lanes run as long as the slowest."""
    cells = [
        box(
            LEFT + 39 * step, 44 + 11 * lane, 36, 9, "full" if step < steps else "empty"
        )
        for lane, steps in enumerate(COUNTS)
        for step in range(max(COUNTS))
    ]
    words = f"jax.lax: {len(COUNTS) * max(COUNTS)} evaluations, of which {sum(COUNTS)} count"
    return [
        _title(16, "A batch of 8 loops"),
        text(LEFT, 35, words, anchor="start"),
        *cells,
    ]


def _leaving() -> list[str]:
    """The batch with `lanes="compact"`: it shrinks when half of its lanes have finished."""
    cells, size, order = [], len(COUNTS), sorted(COUNTS, reverse=True)
    evaluations = 0
    for step in range(max(COUNTS)):
        active = sum(count > step for count in order)
        while active <= size // 2:
            size //= 2
        evaluations += size
        cells += [
            box(
                LEFT + 39 * step,
                170 + 11 * lane,
                36,
                9,
                "full" if order[lane] > step else "empty",
            )
            for lane in range(size)
        ]
    words = (
        f'lanes="compact": {evaluations} evaluations. Finished lanes leave the batch'
    )
    return [text(LEFT, 161, words, anchor="start"), *cells]


def _schedule() -> list[str]:
    """Time goes right, steps go up."""
    picture = schedule.picture(10, 3)
    names = [name for name, _ in picture.actions]
    forward, back = names.count("advance"), names.count("reverse")
    parts, time, kept = [], 0, {}

    def place(time: int, step: int) -> tuple[float, float]:
        return LEFT + (WIDTH - 2 * LEFT) / (forward + back) * time, 494 - 14 * step

    def line(begin: tuple[float, float], end: tuple[float, float], kind: str) -> str:
        return f'<path class="{kind}" d="M{begin[0]:.4g} {begin[1]:.4g}L{end[0]:.4g} {end[1]:.4g}"/>'

    for name, step in picture.actions:
        if name == "keep":
            kept[step] = time
        elif name == "drop":
            parts.append(line(place(kept.pop(step), step), place(time, step), "kept"))
        elif name == "advance":
            parts.append(line(place(time, step), place(time + 1, step + 1), "forward"))
        elif name == "reverse":
            parts.append(line(place(time, step + 1), place(time + 1, step), "back"))
        time += name in ("advance", "reverse")
    words = [
        "The gradient of a loop of 10 steps, with 3 checkpoints",
        f"{forward} evaluations of a step (blue), {back} of a step and its derivative (red),",
        "at most 3 carries stored at a time (grey). Time goes right, steps go up.",
    ]
    lines = [
        text(LEFT, 288 + 17 * i, line, anchor="start")
        for i, line in enumerate(words)
        if i
    ]
    return [
        _title(286, words[0]),
        *lines,
        *sorted(parts, key=lambda part: "kept" not in part),
    ]
