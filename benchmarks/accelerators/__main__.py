"""Write what is counted, as a JSON file and as a page: `python -m benchmarks.accelerators`."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.accelerators import choices, memory
from benchmarks.accelerators.compilers import TARGETS
from benchmarks.accelerators.counted import BODIES, CONTENDERS, counted

FOLDER = Path(__file__).parent
PACKAGES = "jax", "jaxlib", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "libtpu", "equinox"


def tables() -> dict[str, list[dict[str, Any]]]:
    """Of each device and body."""
    found: dict[str, list[dict[str, Any]]] = {}
    for target in TARGETS.values():
        for body in BODIES:
            rows = found.setdefault(f"{target.name}: {body}", [])
            for contender in CONTENDERS:
                row = {"program": contender.program, "loop": contender.name}
                rows.append(row | counted(target, contender, body).row())
                print(target.name, body, rows[-1], flush=True)
        found[f"{target.name}: what Auto takes, foretold"] = choices.rows(target)
    found["h100: memory"] = memory.rows()
    return found


def page(versions: dict[str, str], found: dict[str, list[dict[str, Any]]]) -> str:
    """The tables in Markdown."""
    lines = [
        "# Counted on compiled programs",
        "",
        f"Written by `python -m benchmarks.accelerators`, with {', '.join(map(' '.join, versions.items()))}.",
        "A loop is shown as the kernels of a step, times its length if the compiler knows it. Seconds are those to",
        "trace and to compile, on a machine that did other things, too: compare them within a table.",
    ]
    for title, rows in found.items():
        lines += ["", f"## {title}", "", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Count and write."""
    versions = {name: version(name) for name in PACKAGES}
    found = tables()
    (FOLDER / "results.json").write_text(json.dumps({"versions": versions, "tables": found}, indent=1) + "\n")
    (FOLDER / "results.md").write_text(page(versions, found))


if __name__ == "__main__":
    main()
