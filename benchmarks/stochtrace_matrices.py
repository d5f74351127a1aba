"""Matrices whose trace is known: those on which the stopping rules were chosen, others, and two of real data."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph

IMAGES = 160  # of the graph
HIDDEN, UPDATES = 6, 500  # of the network


def with_eigenvalues(values: Array) -> Array:
    """A symmetric matrix, turned at random."""
    turn, _ = jnp.linalg.qr(jax.random.normal(jax.random.key(0), (len(values), len(values))))
    return (turn * values) @ turn.T


def matrices(n: int) -> dict[str, Array]:
    """Of every kind; the names say the eigenvalues, i = 0, 1, ..."""
    i, normal = jnp.arange(n), jax.random.normal(jax.random.key(1), (n, n))
    return {
        "Wishart": normal @ normal.T / n,
        "0.9^i": with_eigenvalues(0.9**i),
        "0.7^i": with_eigenvalues(0.7**i),
        "1 / (1 + i)^2": with_eigenvalues(1 / (1.0 + i) ** 2),
        "step: n/10 of 1, others 0.001": with_eigenvalues(jnp.where(i < n // 10, 1, 1e-3)),
        "Laplacian": 2 * jnp.eye(n) - jnp.eye(n, k=1) - jnp.eye(n, k=-1),
        "rank one": with_eigenvalues(jnp.where(i < 1, 1.0, 0)),
        "indefinite": (normal + normal.T) / (8 * n) ** 0.5 * 4,
        "indefinite, + 3": (normal + normal.T) / 8**0.5 + 3 * jnp.eye(n),
        "not symmetric": jnp.eye(n) + jax.random.normal(jax.random.key(2), (n, n)) / n**0.5,
    }


def held_out_matrices(n: int) -> dict[str, Array]:
    """Matrices that no choice was made on, but for exp(-i^2 / 200), after which the least variance was chosen.

    The last two are of real data and have sizes of their own.
    """
    i = jnp.arange(n)
    return {
        "1 / (1 + i)": with_eigenvalues(1 / (1.0 + i)),
        "(-0.9)^i": with_eigenvalues((-0.9) ** i),
        "log-normal": with_eigenvalues(jnp.exp(2 * jax.random.normal(jax.random.key(3), (n,)))),
        "two of 1, others 0.02": with_eigenvalues(jnp.where(i < 2, 1, 0.02)),
        "exp(-i^2 / 200)": with_eigenvalues(jnp.exp(-(i**2) / 200)),
        "0.5^i": with_eigenvalues(0.5**i),
        "exp(-i^2 / 50) + 0.000001": with_eigenvalues(jnp.exp(-(i**2) / 50) + 1e-6),
        "triangular": jnp.triu(jnp.ones((n, n))) / n,
        "Laplacian of a graph of digits": graph_laplacian(),
        "Hessian of a network for digits": hessian_of_a_network(),
    }


def is_semidefinite(name: str) -> bool:
    return not name.startswith(("indefinite", "not symmetric", "(-0.9)^i", "triangular", "Hessian"))


@cache
def graph_laplacian() -> Array:
    """Of the graph of images of digits, each joined to the five that are most like it."""
    images, _ = load_digits(return_X_y=True)
    graph = kneighbors_graph(images[:IMAGES], 5).toarray()
    joined = np.maximum(graph, graph.T)
    return jnp.asarray(np.diag(joined.sum(0)) - joined)


@cache
def hessian_of_a_network() -> Array:
    """Of the training loss of a small network that has learnt to tell the digits of images of 4 x 4 pixels."""
    images, labels = load_digits(return_X_y=True)
    pixels = jnp.asarray(images.reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(len(images), 16) / 16)
    inward, outward = jax.random.split(jax.random.key(0))
    weights = {
        "inward": jax.random.normal(inward, (17, HIDDEN)) / 4,
        "outward": jax.random.normal(outward, (HIDDEN + 1, 10)) / HIDDEN**0.5,
    }
    start, unravel = ravel_pytree(weights)

    def loss(flat: Array) -> Array:
        weights = unravel(flat)
        hidden = jnp.tanh(pixels @ weights["inward"][:-1] + weights["inward"][-1])
        logits = hidden @ weights["outward"][:-1] + weights["outward"][-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels)).mean()

    optimizer = optax.adam(0.03)

    def update(_: Array, state: tuple[Array, optax.OptState]) -> tuple[Array, optax.OptState]:
        flat, moments = state
        updates, moments = optimizer.update(jax.grad(loss)(flat), moments)
        return flat + jnp.asarray(updates), moments

    trained, _ = jax.jit(lambda: jax.lax.fori_loop(0, UPDATES, update, (start, optimizer.init(start))))()
    return jax.jit(jax.hessian(loss))(trained)
