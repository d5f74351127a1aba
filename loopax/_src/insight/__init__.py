"""What the loops of a program store and cost, foretold and measured.

May import: core, core/autodiff, core/batching, core/effects, core/ir, core/jaxpr, core/lowering, core/masking,
core/row_buffers, extras, frontend, jax_internals, kinds, lanes, pytrees, queues, schedule.
"""
