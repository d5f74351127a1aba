"""loopax as it is compiled for devices that are not there: an H100, and four chips of a TPU v5e.

XLA's compilers for these devices run on a machine with neither. `make accelerators` installs them.
"""
