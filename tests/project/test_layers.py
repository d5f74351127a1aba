"""The structure of the package: imports only point down, and `__all__` is complete."""

import ast
import importlib
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

import loopax
from loopax._src import public
from tests.support.rooms import FILES, SOURCE, imported, imports_of_rooms

INTERNALS = SOURCE / "jax_internals"
# Where rules of primitives stand in JAX, and how they are registered.
RULE_TABLES = re.compile(
    r"\b(primitive_jvps|primitive_transposes|fancy_transposes|primitive_linearizations|(\w+_)?primitive_batchers"
    r"|custom_partial_eval_rules|partial_eval_jaxpr_custom_rules|dce_rules|custom_typechecks|jet_rules|error_checks"
    r"|register_lowering|deflinear2?|def_impl|def_abstract_eval|def_effectful_abstract_eval)\b"
)
# Parameters of loopax's own primitives that have no named structure: the file of the primitive reads them.
OWN_PARAMETERS = {
    "core/masking.py": {"batch_axes", "when", "has_limits", "lanes"},
    "core/row_buffers.py": {"lane_axes", "appends"},
}
FOLDERS = sorted({file.parent.relative_to(SOURCE).as_posix() for file in FILES} - {".", "core/batching/compact"})


def permitted(folder: str) -> set[str]:
    """What the folder's own docstring says that it may import."""
    docstring = importlib.import_module(f"loopax._src.{folder.replace('/', '.')}").__doc__ or ""
    named = re.search(r"May import: (.*)\.", docstring, re.DOTALL)
    assert named, f"{folder}/__init__.py does not say what it may import"
    return set() if named[1] == "nothing of loopax" else set(re.split(r",\s+", named[1]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_what_it_says(folder: str) -> None:
    assert imports_of_rooms()[folder] == permitted(folder)


def test_no_folder_is_above_and_below_another() -> None:
    assert list(TopologicalSorter(imports_of_rooms()).static_order())  # raises where there is a cycle


def test_no_file_is_above_and_below_another() -> None:
    files = {file: set(imported(file)) for file in FILES}
    assert list(TopologicalSorter(files).static_order())


def test_nobody_asks_which_kind_or_plan_a_loop_has() -> None:
    """A kind is one file: the core asks the object what to do, and never for its class."""
    concrete = "Auto|Bounded|Checkpointed|Lax|Residuals|Checkpoints|EveryCarry|EveryResidual|NoReverseMode"
    asks = re.compile(rf"isinstance\([^()]*, .*\b({concrete})\b|\bcase ({concrete})\(|[!=]= ?({concrete})\(")
    assert asks.search("isinstance(kind, lx.Auto)")
    assert [file for file in FILES if asks.search(file.read_text())] == []


def test_code_stands_below_what_is_public() -> None:
    public_names = re.compile(r"^(from loopax|import loopax)(?!\._src|\._version)", re.MULTILINE)
    assert [file for file in FILES if public_names.search(file.read_text())] == [SOURCE / "public.py"]


def test_private_jax_stands_in_one_folder() -> None:
    assert [file for file in FILES if "jax._src" in file.read_text() and file.parent != INTERNALS] == []


def is_primitive_name(node: ast.AST) -> bool:
    """`eqn.primitive.name`, or `primitive.name`."""
    if not (isinstance(node, ast.Attribute) and node.attr == "name"):
        return False
    return "primitive" in (getattr(node.value, "attr", ""), getattr(node.value, "id", ""))


def asks_for_names(tree: ast.AST) -> Iterator[int]:
    """The lines in which a primitive's name is compared, looked up, or kept for that."""
    for node in ast.walk(tree):
        is_lookup = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "startswith")
        asks = is_lookup or isinstance(node, ast.Compare | ast.Subscript | ast.Assign | ast.NamedExpr | ast.Match)
        if asks and any(map(is_primitive_name, ast.walk(node))):
            yield getattr(node, "lineno", 0)


def parameters_read(tree: ast.AST) -> Iterator[str]:
    """The parameters of equations that are read, or asked for, by their names."""

    def is_params(node: ast.AST) -> bool:
        return "params" in (getattr(node, "attr", ""), getattr(node, "id", ""))

    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_params(node.value):
            yield from constants(node.slice)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("get", "pop"):
            if is_params(getattr(node.func, "value", node)):
                yield from constants(*node.args)
        elif isinstance(node, ast.Compare) and any(map(is_params, node.comparators)):
            yield from constants(node.left)


def constants(*nodes: ast.AST) -> Iterator[str]:
    return (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def outside_of_internals() -> Iterator[tuple[str, str]]:
    """The name and the text of every other file."""
    for file in FILES:
        if file.parent != INTERNALS:
            yield file.relative_to(SOURCE).as_posix(), file.read_text()


def test_rules_are_registered_by_one_function() -> None:
    assert [name for name, text in outside_of_internals() if RULE_TABLES.search(text)] == []


def test_one_folder_knows_the_names_of_jax_primitives() -> None:
    found = {name: list(asks_for_names(ast.parse(text))) for name, text in outside_of_internals()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_one_folder_knows_the_parameters_of_jax_primitives() -> None:
    found = {name: set(parameters_read(ast.parse(text))) for name, text in outside_of_internals()}
    assert {name: parameters for name, parameters in found.items() if parameters} == OWN_PARAMETERS


def test_what_these_tests_find() -> None:
    lines = [
        'if eqn.primitive.name == "scan": pass',
        "name = eqn.primitive.name",
        "_RULES[primitive.name](eqn)",
        "_RULES.get(eqn.primitive.name)",
        "return [eqn.primitive.name]",
    ]
    assert [bool(list(asks_for_names(ast.parse(line)))) for line in lines] == [True, True, True, True, False]
    reads = 'eqn.params["jaxpr"], params["length"], params.get("bound"), "_prim" in eqn.params, other["name"]'
    assert set(parameters_read(ast.parse(reads))) == {"jaxpr", "length", "bound", "_prim"}
    assert RULE_TABLES.search("batching.fancy_primitive_batchers[p] = f")


def test_all_is_complete() -> None:
    names = {name for name in vars(public) if not name.startswith("_")}
    assert names == set(loopax.__all__) <= set(dir(loopax))
    assert all(getattr(loopax, name) is getattr(public, name) for name in names)
    assert list(loopax.__all__) == sorted(loopax.__all__)


def test_everything_public_has_a_docstring() -> None:
    assert all(getattr(loopax, name).__doc__ for name in loopax.__all__)
