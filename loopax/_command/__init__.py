"""`python -m loopax`: a program that uses the library. It stands above all that is public, and imports it."""
