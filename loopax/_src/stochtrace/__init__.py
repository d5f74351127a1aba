"""Trace estimators.

To understand one of them, read its file (`xtrace.py`, say), `sketch.py` if it has a basis, and `estimator.py` for when
it ends and for its error. `operators.py` and `estimate.py` check what users give; `factorizations.py` is used by name.

May import: core/jaxpr, frontend, jax_internals, kinds, loops, pytrees.
"""
