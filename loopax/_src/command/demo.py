"""`python -m loopax demo`: simulate cannon shots, each a loop until it lands, in one batch and with gradients."""

import argparse
import time
from typing import Any

import jax
import numpy as np

import loopax as lx
from loopax._src.command.volley import DRAG, GUNS, aim, distances, drawing, fit, guns, shots

WIDTH, HEIGHT, SHOWN = 76, 16, 5
fire = jax.jit(shots)  # one program for all volleys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""
    del parser


def run(arguments: argparse.Namespace) -> int:
    """Fire, report, differentiate, fit and aim; the exit code is 1 where a gradient is wrong."""
    del arguments
    start = time.perf_counter()
    angles, speeds = guns()
    _show_shots(angles, speeds)
    wrong = _check_gradient(angles, speeds)
    _fit_drag(angles, speeds)
    _aim_at_targets(speeds)
    seconds = time.perf_counter() - start
    print(f"\n{seconds:.0f} seconds, most of them for compiling. The program is loopax/_src/command/volley.py.")
    return int(wrong)


def _show_shots(angles: Any, speeds: Any) -> None:
    print(f"{GUNS} cannons fire. Each shot is a `while_loop` that ends where the shot lands:\n")
    chosen = slice(None, None, GUNS // SHOWN)
    print(drawing(angles[chosen], speeds[chosen], WIDTH, HEIGHT))
    _, info = fire(DRAG, angles, speeds)
    print("\nOne `jax.vmap` for all. What the batch computes for shots that have landed (`lane_report`):\n")
    print(lx.lane_report(info, lanes=lx.Compact(min_lanes=8)))


def _check_gradient(angles: Any, speeds: Any) -> bool:
    """By central differences, which need more digits than float32 has."""
    with jax.enable_x64(True):
        arrays = [np.asarray(a, np.float64) for a in (angles, speeds)]
        mean = jax.jit(jax.value_and_grad(lambda drag: distances(drag, *arrays).mean()))
        step = 1e-6
        (more, _), (_, slope), (less, _) = (map(float, mean(drag)) for drag in (DRAG + step, DRAG, DRAG - step))
        difference = (more - less) / (2 * step)
    print("\nWith 0.001 more drag, the shots fly farther, on average, by")
    print(f"  {slope / 1000:.6f} m, says `jax.grad`, through the loops;")
    print(f"  {difference / 1000:.6f} m, say two more volleys and a subtraction.")
    return not np.isclose(slope, difference, rtol=1e-4)


def _fit_drag(angles: Any, speeds: Any) -> None:
    print("\nNow the drag is unknown, and found from where the shots landed: a loop of gradients of loops.", flush=True)
    landed, _ = fire(DRAG, angles, speeds)
    found = jax.block_until_ready(jax.jit(fit)(landed, angles, speeds))
    print(f"  fitted {found:.5f}, true {DRAG:.5f}")


def _aim_at_targets(speeds: Any) -> None:
    print("\nAnd they are aimed: each cannon by Newton's method, for as many shots as it takes, all in one batch.")
    reach, _ = fire(DRAG, np.full(GUNS, 0.7, np.float32), speeds)
    targets = np.asarray(reach) * np.linspace(0.35, 0.95, GUNS, dtype=np.float32)
    angles, info = jax.jit(jax.vmap(aim))(targets, speeds)
    miss = np.abs(fire(DRAG, angles, speeds)[0] - targets)
    tries = np.bincount(np.asarray(info.num_steps))
    counts = ", ".join(f"{number} with {n}" for n, number in enumerate(tries) if number)
    print(f"  shots: {counts}; the worst miss is {100 * miss.max():.1f} cm at {targets[miss.argmax()]:.0f} m")
