"""What tests of examples share: the precision in which users run them."""

import pytest

from tests.support.example_files import precision_of_a_user


@pytest.fixture
def user_precision():
    """Float32 by default, as without the settings of the tests."""
    with precision_of_a_user():
        yield
