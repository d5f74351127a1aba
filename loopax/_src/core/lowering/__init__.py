"""How loops and reverse sweeps are compiled.

May import: core/buffer_versions, core/ir, core/jaxpr, core/lane_effects, core/masking, jax_internals, schedule,
settings.
"""
