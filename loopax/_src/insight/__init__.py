"""What the loops of a program store and cost, foretold and measured.

May import: core, core/autodiff, core/batching, core/ir, core/jaxpr, core/lowering, core/masking, core/waiting, extras,
frontend, jax_internals, kinds, pytrees, queues, schedule.
"""
