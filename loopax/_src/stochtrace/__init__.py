"""Trace estimators.

To understand one of them, read its file (`xtrace.py`, say), `sketch.py` if it has a basis, `estimator.py` for when it
ends, and `intervals.py` for its error. `operators.py` and `arguments.py` check what users give; `products.py` and
`factorizations.py` are used by name.

May import: core/jaxpr, frontend, jax_internals, kinds, loops, pytrees.
"""
