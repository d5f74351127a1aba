"""Loops that are saved to disk while they run, and resumed by the same call.

May import: core/autodiff, core/batching, core/effects, core/ir, core/jaxpr, core/lowering, core/masking,
core/row_buffers, frontend, jax_internals, kinds, lanes, nnx, progress, pytrees, queues.
"""
