"""Loops that are saved to disk while they run, and resumed by the same call.

May import: core/effects, core/jaxpr, core/lowering, frontend, jax_internals, kinds, lanes, nnx, progress, pytrees,
queues.
"""
