"""Programs on other people's packages, in environments of their own: `make clients` runs them (README.md).

`LOOPAX_CLIENTS` says that this is one of these environments, `small` or `whole`. Elsewhere there is nothing to collect.
"""

import os

import jax

SIZE = os.environ.get("LOOPAX_CLIENTS", "")
collect_ignore_glob = [] if SIZE else ["test_*.py"]

if SIZE:
    # Diffrax reads Equinox's loops when it is imported. How a client promotes shapes and dtypes is its own affair.
    import equinox.internal

    from tests.peers.exchange import equinox_scan, equinox_while_loop

    equinox.internal.while_loop, equinox.internal.scan = equinox_while_loop, equinox_scan
    jax.config.update("jax_numpy_rank_promotion", "allow")
    jax.config.update("jax_numpy_dtype_promotion", "standard")
