"""`python -m loopax demo`: simulate cannon shots, each a loop until it lands, in one batch and with gradients."""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import loopax as lx

GRAVITY, DRAG, DT = 9.81, 0.004, 0.01
GUNS, LONGEST, DESCENTS = 64, 4000, 100
CLOSE = 0.05  # metres


def fly(drag: Any, shot: Any) -> Any:
    """One step of `DT` seconds; a shot is (x, y, speed to the right, speed upwards)."""
    x, y, right, up = shot
    slower = 1.0 - DT * drag * jnp.hypot(right, up)
    right, up = right * slower, up * slower - DT * GRAVITY
    return x + DT * right, y + DT * up, right, up


def muzzle(angle: Any, speed: Any) -> Any:
    """A shot that leaves."""
    zero = jnp.zeros_like(angle)
    return zero, zero, speed * jnp.cos(angle), speed * jnp.sin(angle)


def shoot(drag: Any, angle: Any, speed: Any) -> Any:
    """Where a shot lands, and how many steps it took."""

    def in_air(shot: Any) -> Any:
        return (shot[1] > 0.0) | (shot[3] > 0.0)

    # The first step is taken in any case, so that there is something to fall.
    start = fly(drag, muzzle(angle, speed))
    (x, y, right, up), info = lx.while_loop(in_air, lambda shot: fly(drag, shot), start, max_steps=LONGEST, info=True)
    return x - y * right / up, info  # back to the ground: the loop ends a little below it


shots = jax.vmap(shoot, in_axes=(None, 0, 0))


def fit(landed: Any, angles: Any, speeds: Any) -> Any:
    """The drag with which the shots land there, by gradient descent; shows how far it is."""

    def error(log_drag: Any) -> Any:
        return ((shots(jnp.exp(log_drag), angles, speeds)[0] - landed) ** 2).mean()

    rate = 1.0 / (landed**2).mean()

    def descend(_: Any, log_drag: Any) -> Any:
        return log_drag - rate * jax.grad(error)(log_drag)

    start = jnp.log(5 * DRAG) + 0.0 * landed[0]
    return jnp.exp(lx.fori_loop(0, DESCENTS, descend, start, progress=lx.Progress("fit")))


def aim(target: Any, speed: Any) -> Any:
    """The angle at which a shot lands on the target: Newton's method, with the derivative through the shot."""

    def misses(carry: Any) -> Any:
        _, miss = carry
        return jnp.abs(miss) > CLOSE

    def fire(carry: Any) -> Any:
        angle, _ = carry
        distance, slope = jax.jvp(lambda angle: shoot(DRAG, angle, speed)[0], (angle,), (jnp.ones_like(angle),))
        miss = distance - target
        corrected = angle - jnp.clip(miss / slope, -0.2, 0.2)
        return jnp.where(misses((angle, miss)), corrected, angle), miss

    start = jnp.full_like(speed, 0.2), jnp.full_like(speed, jnp.inf)
    (angle, _), info = lx.while_loop(misses, fire, start, max_steps=30, info=True)
    return angle, info


def drawing(angles: Any, speeds: Any, width: int, height: int) -> str:
    """The paths of some shots as text; `scan` with `stop` returns rows for as many steps as each one takes."""

    def path(angle: Any, speed: Any) -> Any:
        def step(shot: Any, _: Any) -> Any:
            return fly(DRAG, shot), shot[:2]

        def lands(shot: Any, _: Any) -> Any:
            return (shot[1] <= 0.0) & (shot[3] < 0.0)

        return lx.scan(step, muzzle(angle, speed), length=LONGEST, stop=lands)[1]

    xs, ys = map(np.asarray, jax.jit(jax.vmap(path))(angles, speeds))
    across = (width - 1) / xs.max()
    up = (height - 1) / ys.max()
    grid = [[" "] * width for _ in range(height)]
    for number, (row_x, row_y) in enumerate(zip(xs, ys, strict=True)):
        for x, y in zip(row_x, row_y, strict=True):
            if y > 0.0:
                grid[height - 1 - round(y * up)][round(x * across)] = "*o+x."[number % 5]
    ruler = f"{'0':<{width - 8}}{xs.max():>6.0f} m"
    return "\n".join([*("".join(line).rstrip() for line in grid), "=" * width, ruler])


WIDTH, HEIGHT, SHOWN = 76, 16, 5
fire = jax.jit(shots)  # one program for all volleys


def run(_arguments: argparse.Namespace) -> int:
    """Fire, report, differentiate, fit and aim; the exit code is 1 where a gradient is wrong."""
    start, random = time.perf_counter(), np.random.RandomState(0)
    angles = jnp.asarray(random.uniform(0.3, 1.2, GUNS), jnp.float32)
    # With these, some shots take twenty times as many steps as others.
    speeds = jnp.asarray(np.clip(random.lognormal(3.2, 0.6, GUNS), 6.0, 120.0), jnp.float32)
    print(f"{GUNS} cannons fire. Each shot is a `while_loop` that ends where the shot lands:\n")
    chosen = slice(None, None, GUNS // SHOWN)
    print(drawing(angles[chosen], speeds[chosen], WIDTH, HEIGHT))
    landed, info = fire(DRAG, angles, speeds)
    print("\nOne `jax.vmap` for all. What the batch computes for shots that have landed (`lane_report`):\n")
    print(lx.lane_report(info, lanes=lx.Compact(min_lanes=8)))

    # The gradient beside central differences, which need more digits than float32 has.
    with jax.enable_x64(True):
        arrays = [np.asarray(a, np.float64) for a in (angles, speeds)]
        mean = jax.jit(jax.value_and_grad(lambda drag: shots(drag, *arrays)[0].mean()))
        step = 1e-6
        (more, _), (_, slope), (less, _) = (map(float, mean(drag)) for drag in (DRAG + step, DRAG, DRAG - step))
        difference = (more - less) / (2 * step)
    print("\nWith 0.001 more drag, the mean distance changes by")
    print(f"  {slope / 1000:.6f} m, says `jax.grad`, through the loops;")
    print(f"  {difference / 1000:.6f} m, say two more volleys and a subtraction.")

    print("\nNow the drag is unknown, and found from where the shots landed: a loop of gradients of loops.", flush=True)
    found = jax.block_until_ready(jax.jit(fit)(landed, angles, speeds))
    print(f"  fitted {found:.5f}, true {DRAG:.5f}")

    print("\nAnd they are aimed: each cannon by Newton's method, for as many shots as it takes, all in one batch.")
    reach, _ = fire(DRAG, np.full(GUNS, 0.7, np.float32), speeds)
    targets = np.asarray(reach) * np.linspace(0.35, 0.95, GUNS, dtype=np.float32)
    angles, info = jax.jit(jax.vmap(aim))(targets, speeds)
    miss = np.abs(fire(DRAG, angles, speeds)[0] - targets)
    tries = np.bincount(np.asarray(info.num_steps))
    counts = ", ".join(f"{number} with {n}" for n, number in enumerate(tries) if number)
    print(f"  shots: {counts}; the worst miss is {100 * miss.max():.1f} cm at {targets[miss.argmax()]:.0f} m")
    seconds = time.perf_counter() - start
    print(f"\n{seconds:.0f} seconds, most of them for compiling. The program is loopax/_command/demo.py.")
    return int(not np.isclose(slope, difference, rtol=1e-4))
