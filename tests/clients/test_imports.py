"""Each client can be imported, or is on the list of those that cannot, with the error."""

from importlib import import_module

import pytest

from tests.clients.missing import missing_here

CLIENTS = ["blackjax", "diffrax", "jaxley", "jaxopt", "numpyro", "optax", "ott", "torax"]


@pytest.mark.parametrize("client", CLIENTS)
def test_import(client):
    if client not in missing_here():
        import_module(client)
        return
    with pytest.raises(Exception, match=missing_here()[client].error):
        import_module(client)
