"""`python -m loopax`.

May import: calibration, core/jaxpr, extras, insight.
"""
