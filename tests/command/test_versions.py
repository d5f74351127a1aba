"""Which versions are installed, and whether they are in the ranges that loopax's own package names."""

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from loopax._command import installed as versions
from loopax._command.installed import Installed, in_range

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "wanted", "inside"),
    [
        ("0.10.2", ">=0.10.0", True),
        ("0.10.0", ">=0.10.0", True),
        ("0.9.9", ">=0.10.0", False),
        ("0.10", ">=0.10.0", True),
        ("0.12.0.1", ">=0.10.0,<0.12", False),
        ("0.11.9", ">=0.10.0, <0.12", True),
        ("0.12.8.dev3", ">=0.12.8", True),
        ("2.0.0rc1", ">=2.0.0", True),
        ("3.11.7+local", ">=3.11", True),
        ("1.5", "!=1.5.0", False),
        ("1.5", "==1.5.0", True),
        ("1.5", "", True),
    ],
)
def test_ranges(version, wanted, inside):
    assert in_range(version, wanted) is inside


def test_a_range_that_is_not_understood_is_an_error():
    with pytest.raises(ValueError, match="~=1"):
        in_range("1.5", "~=1.4")


def test_all_ranges_of_the_package_are_understood():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [*project["dependencies"], *(name for extra in extras for name in extra)]
    assert all(versions._parsed(requirement).wanted.startswith(">=") for requirement in required)
    assert all(in_range("99.0", versions._parsed(requirement).wanted) for requirement in required)


def test_what_the_package_names_is_found(monkeypatch):
    """The ranges come from the package, not from a second list."""
    required = ["jax>=0.10.0", "numpy>=99", 'no-such-package>=1.0; extra == "flax"', "nor-this-one>=2"]
    monkeypatch.setattr(metadata, "requires", lambda _: required)
    found = {package.name: package for package in versions.found()}
    assert list(found) == ["Python", "loopax", "jax", "jaxlib", "numpy", "no-such-package", "nor-this-one"]
    assert found["jax"].status == "ok"
    assert found["numpy"] == Installed("numpy", metadata.version("numpy"), ">=99", "")
    assert found["numpy"].status == "out of range"
    assert found["no-such-package"].status == "not installed: pip install loopax[flax]"
    assert found["nor-this-one"].status == "FAILS: not installed"
    assert [package.name for package in found.values() if package.fails] == ["numpy", "nor-this-one"]


def test_an_optional_package_that_is_too_old_fails():
    assert Installed("flax", "0.1", ">=0.12.8", "flax").fails


def test_a_copy_of_the_source_that_is_not_installed(monkeypatch):
    def missing(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "metadata", missing)
    assert {"Python", "jax", "jaxlib", "equinox"} <= {package.name for package in versions.found()}
    assert not any(package.fails for package in versions.found())
