"""`sharded_lanes`: what is wrong with its arguments is said before anything runs."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import loopax as lx
from tests.support.limited_loops import raises

COUNTS, STARTS = np.arange(16) % 5, np.linspace(-1.0, 1.0, 16)


def devices():
    return Mesh(np.array(jax.devices()[:8]), ("d",))


def call(in_axes: Any = 0, out_axes: Any = 0, mesh: Any = None, axis="d", counts=None, f=lambda x: x):
    return lambda *args: lx.sharded_lanes(f, mesh or devices(), axis, in_axes=in_axes, out_axes=out_axes)(
        *args, counts=counts
    )


WRONG = [
    (call(f=3), (STARTS,), TypeError, "f of sharded_lanes: got int 3, expected a callable"),
    (call(mesh="cpu"), (STARTS,), TypeError, "expected a `jax.sharding.Mesh`"),
    (call(), (), ValueError, "no argument has lanes"),
    (call(in_axes=None), (STARTS,), ValueError, "no argument has lanes"),
    (call(f=lambda x, y: x), (STARTS, {"a": STARTS[:5]}), ValueError, "args[1]['a']: 5 lanes at axis 0 (float64[5])"),
    (call(), (np.float64(2.0),), ValueError, "got 0 for args[0], which has 0 axes (float64[])"),
    (call(in_axes=(0, 0)), (STARTS,), ValueError, "with an int or None for each part of the arguments"),
    (call(in_axes="0"), (STARTS,), TypeError, "got str '0', expected an int or None"),
    (call(out_axes=None), (STARTS,), ValueError, "got None for result, but every result has lanes"),
    (call(out_axes=2), (STARTS,), ValueError, "got 2 for result, which has 1 axes"),
    (call(out_axes=(0, 0)), (STARTS,), ValueError, "with an int or None for each part of the results"),
    (call(counts=COUNTS[:3]), (STARTS,), ValueError, "got int64[3], expected shape (16,)"),
    (call(counts=COUNTS > 3), (STARTS,), TypeError, "expected a real number for each lane"),
]


def test_bad_arguments():
    for run, args, error, message in WRONG:
        with raises(error, message):
            run(*args)
