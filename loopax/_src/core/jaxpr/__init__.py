"""Tools for jaxprs that know nothing of loops: trace, prune, follow what depends on what, estimate costs.

May import: jax_internals, settings.
"""
