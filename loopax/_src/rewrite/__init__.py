"""`rewrite_loops`: a function with the loops of other libraries replaced.

May import: branches, core/jaxpr, core/masking, frontend, insight, jax_internals, kinds, lanes, loops, messages,
pytrees.
"""
