"""What importing loopax does, and does not do."""

import subprocess
import sys

PROGRAM = "import jax, loopax; assert jax.live_arrays() == []; print('no arrays')"


def test_importing_creates_no_array() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "no arrays"
