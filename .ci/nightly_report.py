"""What the issue of the nightly tests says: `python .ci/nightly_report.py LOG [ADDRESS OF THE RUN]`."""

import platform
import re
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("jax", "jaxlib", "equinox", "jaxtyping", "numpy", "scipy", "flax", "orbax-checkpoint", "tensorstore")
MOST = 200  # names of tests: an issue holds 65536 characters


def versions() -> list[str]:
    """One line for each package, as in a lock file."""
    installed = {name.metadata["Name"].lower(): name.version for name in metadata.distributions()}
    return [f"Python {platform.python_version()}", *(f"{name}=={installed.get(name, 'none')}" for name in PACKAGES)]


def failed(log: str) -> list[str]:
    """The names of tests that failed or could not be collected, as the summary of pytest has them."""
    lines = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", log, re.MULTILINE)
    return list(dict.fromkeys(lines))


def report(log: str | None, run: str = "") -> str:
    """Markdown; no log: no test has run."""
    names = failed(log or "")
    shown = [*(name[:250] for name in names[:MOST]), *([f"and {len(names) - MOST} more"] if len(names) > MOST else [])]
    what = f"{len(names)} failed:" if names else "No test is named as failed: the installation or the run failed."
    block = lambda lines: "\n".join(["```text", *lines, "```"])  # noqa: E731
    parts = ["The tests fail with the newest pre-release of JAX.", block(versions()), what]
    return "\n\n".join([*parts, *([block(shown)] if shown else []), *([f"The run: {run}"] if run else [])]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["versions"]:
        print("\n".join(versions()))
    else:
        path, *address = map(str, sys.argv[1:])
        text = Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).exists() else None
        print(report(text, *address), end="")
