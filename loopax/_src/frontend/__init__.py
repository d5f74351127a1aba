"""From a user's call to a loop of the core: options, numbers of steps, tracing, checks at run time.

May import: core, core/buffer_versions, core/finite, core/ir, core/jaxpr, core/row_buffers, jax_internals, kinds, nnx,
progress, pytrees.
"""
