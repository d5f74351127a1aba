"""`rewrite_loops`: a function with the loops of other libraries replaced.

May import: branches, core/finite, core/ir, core/jaxpr, core/masking, frontend, insight, jax_internals, kinds, loops,
pytrees.
"""
