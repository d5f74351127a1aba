"""Derivatives of loops and of reverse sweeps: rules for jvp, partial evaluation, transposition and `jax.checkpoint`.

May import: core/buffer_versions, core/finite, core/ir, core/jaxpr, core/masking, core/own_arrays, core/waiting,
jax_internals, settings.
"""
