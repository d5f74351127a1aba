"""Users' pytrees, models included: their leaves become arrays and back, how two differ, static arguments.

May import: jax_internals.
"""
