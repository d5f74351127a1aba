"""Any number of items through a fixed number of lanes: of one array, or from a host.

May import: core, core/jaxpr, frontend, jax_internals, nnx, progress, pytrees.
"""
