"""What the primitives are: their parameters, their operands, and what they mean.

May import: core/jaxpr, jax_internals, pytrees, schedule, settings.
"""
