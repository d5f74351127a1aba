"""Effects in bodies: not repeated by a reverse sweep, not caused by finished lanes.

May import: core/ir, core/jaxpr, core/row_buffers, jax_internals.
"""
