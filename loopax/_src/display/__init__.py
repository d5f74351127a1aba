"""How a loop shows how far it is.

May import: core/jaxpr, extras.
"""
