"""Loops that are saved to disk while they run, and resumed by the same call.

May import: core/finite, core/ir, core/jaxpr, core/lane_effects, core/lowering, extras, frontend, jax_internals, kinds,
loops, nnx, progress, pytrees, queues, schedule, settings.
"""
