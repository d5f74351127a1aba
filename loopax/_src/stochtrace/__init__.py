"""Trace estimators.

May import: core/jaxpr, frontend, jax_internals, kinds, loops, pytrees.
"""
