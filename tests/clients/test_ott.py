"""Sinkhorn's algorithm of OTT, until it has converged: its loop in reverse, and not the implicit derivative."""

import jax.numpy as jnp
import numpy as np
from ott.geometry.pointcloud import PointCloud
from ott.problems.linear.linear_problem import LinearProblem
from ott.solvers.linear.sinkhorn import Sinkhorn

import loopax as lx
from tests.clients.gradients import check_gradient

X, Y = (jnp.asarray(np.random.RandomState(seed).randn(rows, 2)) for seed, rows in ((0, 5), (1, 4)))


def transport(scale):
    solver = Sinkhorn(threshold=1e-10, max_iterations=200, inner_iterations=5, implicit_diff=None)
    out = solver(LinearProblem(PointCloud(X * scale, Y, epsilon=0.5)))
    return (out.matrix**2).sum()


def test_sinkhorn():
    check_gradient(lx.rewrite_loops(transport, max_steps=200), 1.1)
