"""What `import loopax` brings with it."""

import subprocess
import sys

TRACES = """
import sys
import jax
import loopax as lx

traces, imported = [], "equinox" in sys.modules

@jax.jit
def root(x):
    traces.append(x)
    return lx.while_loop(lambda y: abs(y**2 - x) > 1e-3, lambda y: (y + x / y) / 2, x, max_steps=50)

root(2.0), root(3.0)
print(imported, len(traces), root._cache_size())
"""


def test_the_first_program_is_traced_and_compiled_once():
    """An import in the midst of a trace changes the settings of JAX 0.12, for which it would be traced again."""
    ended = subprocess.run([sys.executable, "-c", TRACES], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["True", "1", "1"], ended.stdout + ended.stderr
