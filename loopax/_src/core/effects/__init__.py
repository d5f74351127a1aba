"""Effects in bodies: not caused by finished lanes.

May import: core/ir, core/jaxpr, core/row_buffers, jax_internals.
"""
