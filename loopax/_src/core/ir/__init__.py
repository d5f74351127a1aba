"""What the primitives are: their parameters, their operands, and what they mean.

May import: core/jaxpr, core/masking, jax_internals, pytrees, schedule, settings.
"""
