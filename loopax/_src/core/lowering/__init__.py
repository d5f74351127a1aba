"""How loops and reverse sweeps are compiled.

May import: core/buffer_versions, core/ir, core/jaxpr, core/masking, jax_internals, schedule, settings.
"""
