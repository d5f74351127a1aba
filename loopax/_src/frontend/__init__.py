"""From a user's call to a loop of the core: options, numbers of steps, tracing, checks at run time.

May import: core, core/buffer_versions, core/ir, core/jaxpr, jax_internals, kinds, nnx, progress, pytrees.
"""
