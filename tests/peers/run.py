"""Run the peers' loop tests on loopax: `python tests/peers/run.py FOLDER [options of pytest]`.

FOLDER holds checkouts of their repositories, `equinox`, `jax`, `flax` and `diffrax`, of the installed versions.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
DIFFRAX = ("integrate", "adjoint", "saveat_solution", "event")
DIFFRAX += ("adaptive_stepsize_controller", "vmap", "step_to", "solver")
PEERS = {
    "equinox": ["tests/test_while_loop.py", "tests/test_scan.py"],
    "jax": ["tests/lax_control_flow_test.py"],
    "flax": ["tests/nnx/transforms_test.py"],
    "diffrax": [f"test/test_{name}.py" for name in DIFFRAX],
}


def available(folder: Path) -> list[str]:
    """The peers of which there is a checkout."""
    return [peer for peer, files in PEERS.items() if all((folder / peer / file).exists() for file in files)]


def run(peer: str, folder: Path, options: Sequence[str] = ()) -> int:
    """Run a peer's tests in a process of its own, where its settings and its package `tests` disturb nobody.

    Those of Diffrax take one for each file, as in its own command: XLA crashes in a process that has compiled so much.
    """
    root = (folder / peer).resolve()
    files = [str(root / file) for file in PEERS[peer]]
    own = ["-c", os.devnull, "--rootdir", str(root), "-p", "exchange", "-p", "no:cacheprovider", "-q", "-rfEX"]
    # The peer's settings, not those that a test of ours may have made for its own process.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *own, *options]
    parts = [[file] for file in files] if peer == "diffrax" and "--some" not in options else [files]
    return max(subprocess.run([*command, *part], env=environment, check=False).returncode for part in parts)


def main() -> int:
    """Run all that are there."""
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    folder, options = Path(sys.argv[1]), sys.argv[2:]
    if not (peers := available(folder)):
        print(f"{folder} holds none of {', '.join(PEERS)}, with the files {PEERS}.")
        return 2
    return max(run(peer, folder, options) for peer in peers)


if __name__ == "__main__":
    sys.exit(main())
