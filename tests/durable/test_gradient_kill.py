"""A gradient whose process is killed (SIGKILL) at random moments of all passes ends with the same bits.

`make kill-test` does this fifty times; here it is a few times.
"""

import os
import random
import resource
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopax import durable
from tests.durable.cases import same_bits
from tests.hosts.processes import Processes

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("LOOPAX_KILLS", "3"))
PROGRAM = "tests.hosts.programs:gradient_of_all_devices"
EVERY = 0.1  # seconds


def begun(path):
    return Processes(PROGRAM, 1, 1, [path / "run", path / "marks", EVERY])


def marks(path):
    """How many chunks have been evaluated, also by processes that were killed."""
    return os.path.getsize(path / "marks") if (path / "marks").exists() else 0


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    """It loses at most what is evaluated between two saves, and what has to be computed again for it."""
    choose, undisturbed = random.Random(7), tmp_path / "undisturbed"
    undisturbed.mkdir()
    with begun(undisturbed) as process:
        expected = process.found()
    most = marks(undisturbed)
    for number in range(KILLS):
        before = marks(tmp_path)
        with begun(tmp_path) as process:
            some = choose.randrange(1, max(2 * most // KILLS, 2) + 20)
            process.wait_until(lambda some=some, before=before: marks(tmp_path) >= before + some)
            time.sleep(choose.uniform(0, 0.03))
            process.kill()
            (killed,) = process.wait()
        assert killed.returncode in (-signal.SIGKILL, 0), (number, killed)
    with begun(tmp_path) as process:
        assert process.found() == expected
        (last,) = process.wait()
    assert [line for line in last.output.splitlines() if "amaged" in line] == []


def run_large(directory):
    """States of more than a megabyte, that do not compress."""
    start = jax.random.normal(jax.random.key(0), (200_000,))
    step = lambda rate, carry, x: (jnp.sin(carry * rate) + x, None)
    loss = lambda rate, carry, _: (carry**2).sum() * rate
    run = durable.value_and_grad(loss, step, directory=directory, chunk_steps=5, checkpoint_every=5)
    value, gradients = run(jnp.float64(1.3), start, np.sin(np.arange(60.0)))
    return value, gradients.params, gradients.init


def on_a_full_disk(directory):
    """What is said in a process in which no file may be larger than 60 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    try:
        run_large(directory)
    except durable.SaveError as error:
        return str(error)
    return "nothing"


def test_a_disk_that_fills_stops_the_run_and_the_same_call_goes_on(tmp_path):
    with Processes(f"{__name__}:on_a_full_disk", 1, 1, [tmp_path / "run"]) as process:
        (said,) = process.found()
    assert "durable.value_and_grad: saving to " in said
    assert "Make room or mend the file system, and call again" in said
    same_bits(run_large(tmp_path / "run"), run_large(tmp_path / "new"))


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_the_run(tmp_path, signal_):
    with Processes(PROGRAM, 1, 1, [tmp_path / "undisturbed"]) as process:
        expected = process.found()
    for some in (10, 60):  # on the way ahead, and on the way back
        before = marks(tmp_path)
        with begun(tmp_path) as process:
            process.wait_until(lambda some=some, before=before: marks(tmp_path) >= before + some)
            process._processes[0].send_signal(signal_)
            (ended,) = process.wait()
        assert "durable.value_and_grad: interrupted after" in ended.output or signal_ == signal.SIGTERM
        assert ended.returncode in ((143,) if signal_ == signal.SIGTERM else (1, -signal.SIGINT))
    with begun(tmp_path) as process:
        assert process.found() == expected
