"""Programs that are built of loops: nested loops as one, items through a queue.

May import: core/batching, core/ir, core/jaxpr, core/lowering, jax_internals, messages.
"""
