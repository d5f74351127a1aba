"""`jax.vmap` of loops and of reverse sweeps.

May import: core/autodiff, core/buffer_versions, core/ir, core/jaxpr, core/lane_effects, core/masking, core/own_arrays,
core/row_buffers, core/stopped_loops, jax_internals.
"""
