"""`python -m loopax`.

May import: extras, insight.
"""
