"""NUTS of BlackJAX and of NumPyro, as they are, with chains that do not wait for each other.

A draw of NUTS doubles a tree of leapfrog steps until it turns back: three loops in each other, whose numbers of steps
differ from chain to chain. Under `jax.vmap`, each draw takes as long as the largest tree of all chains.
`loopax.rewrite_loops(chain, lanes="free")` makes one loop of draws, trees and leapfrogs, so that a chain goes on to its
next draw while others are still in theirs. The draws are the same.

`python examples/nuts.py` samples two posteriors with 64 and with 256 chains, prints seconds and effective samples a
second beside `jax.vmap`, and draws `examples/nuts.png`. It takes three minutes, and needs `pip install blackjax`; it
uses NumPyro where that is installed. It fails if the means of the draws differ.

Eight schools: effects of coaching on test scores (Rubin 1981), in the centred form. Rats: weights of 30 young rats in
five weeks, a line for each (Gelfand, Hills, Racine-Poon and Smith 1990).
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import loopax as lx

FIGURE = Path(__file__).parent / "nuts.png"
DRAWS, WARMUP, DOUBLINGS, ROUNDS = 100, 500, 8, 3

EFFECTS = np.array([28, 8, -3, 7, -1, 1, 18, 12], np.float32)
ERRORS = np.array([15, 10, 16, 11, 9, 11, 10, 18], np.float32)
DAYS = np.array([8, 15, 22, 29, 36], np.float32)
# A row for each day.
WEIGHTS = np.loadtxt(
    StringIO("""\
151 145 147 155 135 159 141 159 177 134 160 143 154 171 163 160 142 156 157 152 154 139 146 157 132 160 169 157 137 153
199 199 214 200 188 210 189 201 236 182 208 188 200 221 216 207 187 203 212 203 205 190 191 211 185 207 216 205 180 200
246 249 263 237 230 252 231 248 285 220 261 220 244 270 242 248 234 243 259 246 253 225 229 250 237 257 261 248 219 244
283 293 312 272 280 298 275 297 350 260 313 273 289 326 281 288 280 283 307 286 298 267 272 285 286 303 295 289 258 286
320 354 328 297 323 331 305 338 376 296 352 314 325 358 312 324 316 317 336 321 334 302 302 323 331 345 333 316 291 324
"""),
    np.float32,
)

Parameters = dict[str, Any]


# The posteriors ------------------------------------------------------------------------------------------


class Posterior(NamedTuple):
    """Where to begin, and the logarithm of the density up to a constant."""

    start: Parameters
    log_density: Callable[[Parameters], Array]


def normal(x: Any, mean: Any, log_scale: Any) -> Array:
    """The logarithm of the density of all `x`."""
    return (-0.5 * ((x - mean) / jnp.exp(log_scale)) ** 2 - log_scale).sum()


def eight_schools(q: Parameters) -> Array:
    """The effect of each school; their mean, and the logarithm of how much they differ."""
    spread = -jnp.log1p(jnp.exp(2 * q["log_spread"]) / 25) + q["log_spread"]  # half-Cauchy
    schools = normal(q["effects"], q["mean"], jnp.full(8, q["log_spread"]))
    return spread + normal(q["mean"], 0.0, np.log(5.0)) + schools + normal(EFFECTS, q["effects"], np.log(ERRORS))


def rats(q: Parameters) -> Array:
    """The weight of each rat at 22 days, and what it gains a day; means, and logarithms of how much they differ."""
    guess, width = jnp.array([240.0, 6.0]), jnp.log(jnp.array([50.0, 5.0]))
    scales = normal(q["log_scales"], jnp.log(jnp.array([14.0, 0.5, 6.0])), jnp.zeros(3))
    lines = normal(q["lines"], q["mean"], jnp.broadcast_to(q["log_scales"][:2], (30, 2)))
    expected = q["lines"][:, 0] + (DAYS - 22)[:, None] * q["lines"][:, 1]
    weights = normal(WEIGHTS, expected, jnp.broadcast_to(q["log_scales"][2], WEIGHTS.shape))
    return normal(q["mean"], guess, width) + scales + lines + weights


POSTERIORS = {
    "eight schools": Posterior(
        {"mean": jnp.zeros(()), "log_spread": jnp.ones(()), "effects": jnp.zeros(8)}, eight_schools
    ),
    "rats": Posterior(
        {
            "mean": jnp.array([240.0, 6.0]),
            "log_scales": jnp.log(jnp.array([14.0, 0.5, 6.0])),
            "lines": jnp.tile(jnp.array([240.0, 6.0]), (30, 1)),
        },
        rats,
    ),
}


# The samplers: a chain of (key, start) -> (draws, leapfrogs of each) -------------------------------------


def adapted(posterior: Posterior) -> tuple[Parameters, dict[str, Any]]:
    """A draw, and step size and masses that suit."""
    warmup: Any = blackjax.window_adaptation(blackjax.nuts, posterior.log_density)
    (state, parameters), _ = jax.jit(lambda key: warmup.run(key, posterior.start, WARMUP))(jax.random.key(0))
    return state.position, parameters


def of_blackjax(posterior: Posterior, parameters: dict[str, Any], draws: int) -> Callable[..., Any]:
    """As its documentation writes it."""
    nuts: Any = blackjax.nuts(posterior.log_density, **parameters, max_num_doublings=DOUBLINGS)

    def chain(key: Array, start: Parameters) -> Any:
        def draw(state: Any, key: Array) -> Any:
            state, info = nuts.step(key, state)
            return state, (state.position, info.num_integration_steps)

        return jax.lax.scan(draw, nuts.init(start), jax.random.split(key, draws))[1]

    return chain


def of_numpyro(posterior: Posterior, parameters: dict[str, Any], draws: int) -> Callable[..., Any]:
    """The functions below its `MCMC`."""
    hmc = import_module("numpyro.infer.hmc").hmc

    init, sample = hmc(potential_fn=lambda q: -posterior.log_density(q), algo="NUTS")

    def chain(key: Array, start: Parameters) -> Any:
        state = init(
            start,
            num_warmup=0,
            rng_key=key,
            step_size=parameters["step_size"],
            inverse_mass_matrix=parameters["inverse_mass_matrix"],
            adapt_step_size=False,
            adapt_mass_matrix=False,
            max_tree_depth=DOUBLINGS,
        )

        def draw(state: Any, _: None) -> Any:
            state = sample(state)
            return state, (state.z, state.num_steps)

        return jax.lax.scan(draw, state, None, draws)[1]

    return chain


def samplers() -> dict[str, Callable[..., Any]]:
    """Those that are installed."""
    found = {"BlackJAX": of_blackjax}
    return found | ({"NumPyro": of_numpyro} if find_spec("numpyro") else {})


# Side by side --------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A batch of chains, and how long it took."""

    draws: Parameters
    leapfrogs: np.ndarray  # [chains, draws]
    seconds: float

    @property
    def effective(self) -> float:
        """Effective samples a second, of the parameter with the fewest."""
        flat = (x.reshape(*x.shape[:2], -1) for x in self.draws.values())
        return min(float(blackjax.ess(x).min()) for x in flat) / self.seconds


def both(chain: Callable[..., Any], chains: int, start: Parameters) -> tuple[Run, Run]:
    """Under `jax.vmap`, and with free lanes: the least of some times."""
    keys = jax.random.split(jax.random.key(1), chains)
    starts = jax.tree.map(lambda x: jnp.broadcast_to(x, (chains, *x.shape)), start)
    free = lx.rewrite_loops(chain, lanes="free")
    programs = [jax.jit(jax.vmap(f)).lower(keys, starts).compile() for f in (chain, free)]
    results, seconds = [program(keys, starts) for program in programs], [float("inf")] * 2
    for _ in range(ROUNDS):
        for place, program in enumerate(programs):
            begun = perf_counter()
            jax.block_until_ready(program(keys, starts))
            seconds[place] = min(seconds[place], perf_counter() - begun)
    waiting, free = (Run(draws, np.asarray(n), time) for (draws, n), time in zip(results, seconds, strict=True))
    return waiting, free


def every_run() -> Iterator[tuple[str, tuple[Run, Run]]]:
    """Both ways for each sampler, posterior and number of chains."""
    for name, posterior in POSTERIORS.items():
        start, parameters = adapted(posterior)
        for sampler, make in samplers().items():
            for chains in (64, 256):
                yield f"{sampler}, {name}, {chains} chains", both(make(posterior, parameters, DRAWS), chains, start)


def report(runs: dict[str, tuple[Run, Run]]) -> Table:
    """What both ways take. Leapfrogs are those of the batch: the largest of all chains in each draw, or of a chain."""
    table = Table("vmap; free lanes", "leapfrogs", "seconds", "effective samples a second")
    for name, pair in runs.items():
        steps = pair[0].leapfrogs
        seconds, effective = (f"{a.seconds:.3f}" for a in pair), (f"{a.effective:.0f}" for a in pair)
        table.add_row(name, f"{steps.max(0).sum()}; {steps.sum(1).max()}", "; ".join(seconds), "; ".join(effective))
    return table


def draw(runs: dict[str, tuple[Run, Run]]) -> Figure:
    """Effective samples a second, and how the leapfrogs of chains add up."""
    figure = Figure(figsize=(5, 6), layout="constrained")
    bars, lines = figure.subplots(2, 1)
    places = np.arange(len(runs))
    for shift, label, which in ((0.2, "jax.vmap", 0), (-0.2, "free lanes", 1)):
        bars.barh(places + shift, [pair[which].effective for pair in runs.values()], 0.4, label=label)
    bars.set_yticks(places, [name.replace(", ", "\n", 1) for name in runs], fontsize=7)
    bars.invert_yaxis()
    bars.set(title="Effective samples a second")
    bars.legend(frameon=False)
    name, (waiting, _) = next((name, pair) for name, pair in runs.items() if "rats" in name)
    steps, numbers = waiting.leapfrogs, np.arange(1, DRAWS + 1)
    lines.plot(numbers, steps.cumsum(1).T, color="C1", alpha=0.2, linewidth=0.5)
    lines.plot([], color="C1", label="of each chain")
    lines.plot(numbers, steps.max(0).cumsum(), color="C0", label="of the largest tree of all chains")
    lines.set(xlabel="draws", ylabel="leapfrogs", title=f"Leapfrogs so far: {name}")
    lines.legend(frameon=False)
    return figure


def main() -> None:
    """Sample, print and draw."""
    runs = dict(every_run())
    Console(width=120).print(report(runs))
    draw(runs).savefig(FIGURE, dpi=150)
    for waiting, free in runs.values():
        for name, draws in waiting.draws.items():
            means, spread = (jnp.mean(x, (0, 1)) for x in (draws, free.draws[name])), draws.std((0, 1))
            ours, theirs = means
            assert (jnp.abs(ours - theirs) <= 0.1 * spread).all()


if __name__ == "__main__":
    main()
