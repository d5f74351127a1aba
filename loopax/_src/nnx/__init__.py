"""Flax NNX models in loops: references become arrays and back.

May import: jax_internals, pytrees.
"""
