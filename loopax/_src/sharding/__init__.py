"""`sharded_lanes`: lanes over the devices of a mesh.

May import: frontend, jax_internals, nnx, pytrees.
"""
