"""Loops that are saved to disk while they run, and resumed by the same call.

May import: core/effects, core/ir, core/jaxpr, core/lowering, extras, frontend, jax_internals, kinds, nnx, progress,
pytrees, queues.
"""
