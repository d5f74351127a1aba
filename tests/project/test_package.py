"""What importing loopax does, and what is published with it: the wheel, the citation, the versions of tools."""

import ast
import re
import subprocess
import sys
import tomllib
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

import jax
import pytest
import yaml

import loopax

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ADDRESSES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["loopax"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_has_the_whole_package_and_says_that_it_is_typed(wheel: Path) -> None:
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "loopax/py.typed" in names
    assert names == {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "loopax").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_an_index_finds_all_links_of_the_readme(wheel: Path) -> None:
    """Links of the repository lead to files there; code stays as it is."""
    (name,) = (name for name in ZipFile(wheel).namelist() if name.endswith("/METADATA"))
    fields, _, shown = ZipFile(wheel).read(name).decode().partition("\n\n")
    repository = ADDRESSES["repository"]
    links = re.findall(r"\]\(([^)]*)\)", README)
    expected = [link if re.match(r"\w+:|#", link) else f"{repository}/blob/main/{link}" for link in links]
    pictures = [link.replace("/blob/", "/raw/") if link.endswith(".svg") else link for link in expected]
    assert re.findall(r"\]\(([^)]*)\)", shown) == pictures
    assert re.sub(r"\]\([^)]*\)", "", shown).split() == re.sub(r"\]\([^)]*\)", "", README).split()
    assert f"Project-URL: Source, {repository}\n" in fields
    assert f"Project-URL: Documentation, {ADDRESSES['documentation']}\n" in fields


def test_the_addresses_stand_in_one_place() -> None:
    tracked = subprocess.run(
        ["git", "grep", "-l", "OWNER/loopax"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert set(tracked.stdout.split()) <= {"pyproject.toml", "tests/project/test_package.py"}


def test_a_release_is_refused_that_is_not_ready() -> None:
    """Another version than that of the code, here and in the citation and the changelog."""
    check = [sys.executable, str(ROOT / ".ci" / "check_release.py")]
    ours = subprocess.run([*check, f"v{loopax.__version__}"], capture_output=True, text=True, check=False)
    others = subprocess.run([*check, "v99.0.0"], capture_output=True, text=True, check=False)
    missing = {line.split(":")[0] for line in others.stderr.splitlines()} - {"pyproject.toml"}
    recipe = "packaging/conda-forge/recipe.yaml"
    assert missing == {"loopax/_version.py", "CITATION.cff", "mkdocs.yml", recipe, "CHANGELOG.md"}
    assert {line.split(":")[0] for line in ours.stderr.splitlines()} <= {"pyproject.toml"}


def test_the_recipe_for_conda_forge_is_of_this_version_and_its_requirements(tmp_path: Path) -> None:
    """Name, version, Python, and every requirement as pyproject.toml has them; conda-forge splits matplotlib."""
    sdist = tmp_path / "loopax.tar.gz"
    sdist.write_bytes(b"a file")
    command = [sys.executable, str(ROOT / ".ci/conda_recipe.py"), str(sdist), "https://index/l/loopax/"]
    recipe = yaml.safe_load(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    context, requirements, about = recipe["context"], recipe["requirements"], recipe["about"]
    written = lambda listed: {requirement.replace(">=", " >=") for requirement in listed}
    extras = {one for listed in project["optional-dependencies"].values() for one in listed}

    assert (recipe["package"]["name"], context["version"]) == (project["name"], loopax.__version__)
    assert f">={context['python_min']}" == project["requires-python"]
    assert requirements["host"] == ["python ${{ python_min }}.*", "pip", "hatchling"]
    assert {*requirements["run"]} == {"python >=${{ python_min }}"} | written(project["dependencies"])
    constraints = {one.replace("matplotlib-base", "matplotlib") for one in requirements["run_constraints"]}
    assert constraints == written(extras)
    assert (about["summary"], about["license"]) == (project["description"], project["license"])
    assert (about["repository"], about["documentation"]) == (ADDRESSES["repository"], ADDRESSES["documentation"])
    assert recipe["source"]["sha256"] == sha256(b"a file").hexdigest()
    assert recipe["source"]["url"] == "https://index/l/loopax/loopax-${{ version }}.tar.gz"
    assert recipe["extra"]["recipe-maintainers"] == [ADDRESSES["repository"].split("/")[-2]]


def test_the_citation_is_of_this_version() -> None:
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE) == [loopax.__version__]


def test_the_site_is_of_this_version() -> None:
    """docs/check.py looks for it in each page."""
    assert re.findall(r"^  release: (\S+) ", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE) == [loopax.__version__]


def test_the_site_has_no_link_to_a_repository_that_is_not_known() -> None:
    command = [sys.executable, str(ROOT / ".ci" / "repository.py")]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert known == ("" if "OWNER" in ADDRESSES["repository"] else ADDRESSES["repository"])


def test_pre_commit_has_the_locked_ruff() -> None:
    (locked,) = re.findall(r"^ruff==(.*)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"ruff-pre-commit\n    rev: v(.*)$", hooks, re.MULTILINE) == [locked]


def test_hosted_tests_call_targets_that_are_there() -> None:
    """`make test-${{ matrix.name }}` is one for each other environment."""
    makefile, workflow = (ROOT / "Makefile").read_text(), (ROOT / ".github/workflows/tests.yml").read_text()
    others = set(re.findall(r"- \{?name: ([\w.]+)[,\n]", workflow))
    targets = {target for line in re.findall(r"run: (?:env .* )?make ([\w -]+\w)", workflow) for target in line.split()}
    assert others == {"lowest", "newest", "python3.13", "python3.14"}
    for target in targets | {f"test-{name}" for name in others}:
        assert re.search(rf"^(?:[\w.-]+ )*{re.escape(target)}(?: [\w.-]+)*:", makefile, re.MULTILINE), target


LOG = """
tests/a.py F
FAILED tests/a.py::test_b[x - y] - AssertionError: 1 - 2
FAILED tests/a.py::test_c
ERROR tests/d.py
ERROR tests/d.py
= 2 failed, 1 error in 3 s =
"""


def test_a_nightly_failure_is_reported_with_versions_and_names(tmp_path: Path) -> None:
    def report(name: str) -> str:
        command = [sys.executable, str(ROOT / ".ci/nightly_report.py"), str(tmp_path / name), "ADDRESS"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    (tmp_path / "log").write_text(LOG)
    (tmp_path / "many").write_text("".join(f"FAILED tests/a.py::test_{i:050d}\n" for i in range(3000)))
    assert f"\njax=={jax.__version__}\n" in report("log")
    assert "3 failed:\n\n```text\ntests/a.py::test_b[x" in report("log")
    assert "\ntests/a.py::test_c\ntests/d.py\n```\n\nThe run: ADDRESS\n" in report("log")
    assert "No test is named as failed" in report("none")
    assert "and 2800 more" in report("many")
    assert len(report("many")) < 65536


def test_workflows_name_no_index() -> None:
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        assert not re.search(r"https?://|--(extra-)?index-url (?!\"\$)", file.read_text()), file


def test_windows_runs_all_tests_but_those_that_are_named() -> None:
    """In the job, or in the comment above it that says why not."""
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    comment, job = re.findall(r"(?<=\n\n)((?:  #.*\n)+)  windows:\n((?:    .*\n)+)", workflow)[0]
    runs = set(re.findall(r"\btests/([\w.]+)", job))
    there = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert runs <= there
    assert there - runs <= set(re.findall(r"`(\w+)`", comment))


def test_windows_can_install_what_is_locked() -> None:
    """`pip freeze` on Linux writes what Orbax asks for elsewhere than on Windows."""
    lock = (ROOT / "requirements-newest.lock").read_text()
    assert re.findall(r"^uvloop.*$", lock, re.MULTILINE)[0].endswith('; sys_platform != "win32"')


def test_the_benchmark_has_the_newest_versions() -> None:
    """Those of the newest lock, and the peers beside them."""
    newest, benchmark = ((ROOT / f"requirements-{name}.lock").read_text() for name in ("newest", "benchmark"))
    pins = lambda text: set(re.findall(r"^[^#].*==.*$", text, re.MULTILINE))
    assert pins(newest) < pins(benchmark)


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    """Those that pyproject.toml admits, and those of `make test-all`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = re.findall(r"^(\w+)==(.*)$", (ROOT / "requirements-lowest.lock").read_text(), re.MULTILINE)
    assert [d for d in project["dependencies"] if tuple(d.partition(",")[0].split(">=")) not in pins] == []


def opens_text(call: ast.Call) -> bool:
    """Whether a call opens, reads or writes a file as text."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else f"builtin {getattr(call.func, 'id', '')}"
    if name not in ("builtin open", "fdopen"):
        return name in ("read_text", "write_text")
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    modes = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return not any("b" in mode for mode in modes)


def test_files_have_the_same_encoding_on_every_system() -> None:
    """That of a language, which Windows takes unless told otherwise, cannot read what others have written."""
    for file in [*(ROOT / "loopax").rglob("*.py"), *(ROOT / ".ci").glob("*.py"), ROOT / "hatch_build.py"]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and opens_text(node):
                assert "encoding" in {keyword.arg for keyword in node.keywords}, f"{file}:{node.lineno}"


NO_ARRAY = "import jax, loopax; loopax.scan; assert jax.live_arrays() == []; print('no arrays')"
IN_A_TRACE = """
import jax, loopax as lx
with jax.checking_leaks():
    print(jax.jit(lambda x: lx.fori_loop(0, 3, lambda i, x: x + 1, x))(1), lx.rollout.__name__)
"""
BY_SUBMODULE = (
    "import loopax._src.rollout, loopax._src.history, loopax as lx; print(lx.rollout.__name__, lx.History.__name__)"
)
SUBMODULES = """
import loopax as lx
print(lx.schedule.picture.__name__, lx.insight.Advice.__name__, lx.durable.scan.__name__)
"""


def printed(program: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_creates_no_array() -> None:
    assert printed(NO_ARRAY) == "no arrays"


def test_names_are_there_wherever_they_are_used_first() -> None:
    assert printed(IN_A_TRACE) == "4 rollout"
    assert printed(BY_SUBMODULE) == "rollout History"
    assert printed(SUBMODULES) == "picture Advice scan"


def test_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'loopax' has no attribute 'scann'"):
        loopax.scann  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
