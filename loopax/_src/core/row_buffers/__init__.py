"""Arrays of which a step reads and writes rows: operations, and the versions that they make.

May import: core/ir, core/jaxpr, core/masking, jax_internals.
"""
