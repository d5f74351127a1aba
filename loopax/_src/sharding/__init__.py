"""`sharded_lanes`: lanes over the devices of a mesh.

May import: core/batching, frontend, jax_internals, nnx, pytrees.
"""
