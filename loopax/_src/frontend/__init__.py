"""From a user's call to a loop of the core: options, numbers of steps, tracing, checks at run time.

May import: core, core/ir, core/jaxpr, core/row_buffers, function_names, jax_internals, kinds, lanes, messages,
nnx, progress, pytrees.
"""
