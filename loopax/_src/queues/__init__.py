"""Any number of items through a fixed number of lanes: of one array, or from a host.

May import: core, core/jaxpr, frontend, function_names, jax_internals, messages, nnx, progress, pytrees.
"""
