"""How loops and reverse sweeps are compiled.

May import: core/ir, core/jaxpr, core/masking, jax_internals, schedule.
"""
