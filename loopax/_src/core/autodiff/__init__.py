"""Derivatives of loops and of reverse sweeps: rules for jvp, partial evaluation, transposition and `jax.checkpoint`.

May import: core/ir, core/jaxpr, core/masking, core/row_buffers, jax_internals, messages, schedule.
"""
