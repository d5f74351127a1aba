"""Effects in bodies: not caused by finished lanes.

May import: core/ir, core/jaxpr, core/masking, core/row_buffers, jax_internals, messages.
"""
