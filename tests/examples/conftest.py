"""What tests of examples share: the precision in which users run them, and the example of the file's name."""

import jax
import pytest

from tests.support.example_files import load_example, precision_of_a_user


@pytest.fixture(autouse=True)
def _user_precision():
    """Float32 by default, as without the settings of the tests."""
    with precision_of_a_user():
        yield


@pytest.fixture
def double_precision():
    """For comparisons to rounding."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def example(request):
    """A module of its own for each test, which may change it."""
    return load_example(request.module.__name__.rpartition("test_")[2])
