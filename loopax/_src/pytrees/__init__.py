"""Users' pytrees: their leaves, how two differ, and arguments that are static.

May import: jax_internals.
"""
