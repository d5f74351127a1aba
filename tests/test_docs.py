"""The code of the README and of the pages runs as written."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code(page):
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


@pytest.mark.parametrize("page", [p for p in PAGES if code(p)], ids=lambda p: p.name)
def test_page(page):
    """One after another, as somebody types them: with JAX's default settings."""
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(compile(code(page), page.name, "exec"), {"__name__": page.stem})


def test_the_first_example_of_the_readme():
    """What its comments say."""
    source = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    names = {}
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        exec(source, names)
        roots = jax.vmap(names["newton"])(names["targets"], names["targets"])
        slopes = jax.vmap(jax.grad(names["newton"], 1))(names["targets"], names["targets"])
    assert roots.tolist() == pytest.approx([2**0.5, 3.0, 1000.0], rel=1e-5)
    assert slopes.tolist() == pytest.approx([0.5 / 2**0.5, 1 / 6, 1 / 2000], rel=1e-3)


def test_links_between_pages():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
