"""Flax NNX models in loops: references become arrays and back.

May import: core/jaxpr, jax_internals, pytrees.
"""
