"""What finished lanes of a batch read, and rows in which no lane has finished.

May import: core/jaxpr, jax_internals.
"""
