"""`jax.vmap` of loops and of reverse sweeps.

May import: core/autodiff, core/buffer_versions, core/effects, core/ir, core/jaxpr, core/masking, core/row_buffers,
jax_internals.
"""
