"""The shape of the project: links, layout, imports, dependencies, the README's two commands."""

import ast
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = {"spec": "../spec", "kernels": "../kernels", "model": "../model", "tiny": "../golden/tiny"}
FOLDERS = ("spec", "kernels", "model", "ddtree_numba", "golden", "tests", "bench")
KERNEL_TOOLS = {"ptx", "launch", "simt"}
MAX_LINES = 300
MAX_EMBEDDED_BYTES = 16_000_000

# Who may import whom: numpy specifications at the bottom, the command on top.
REACH = {
    "spec": {"spec"},
    "kernels": {"spec", "kernels"},
    "model": {"spec", "kernels", "model"},
}
SPEC_PACKAGES = {"numpy", "ml_dtypes"}


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).glob("*.py"))


def stems(folder: str) -> set[str]:
    return {path.stem for path in sources(folder)} - {"__init__"}


def operations() -> set[str]:
    """Specifications that count their cost; other files in spec/ are shared by them."""
    return {path.stem for path in sources("spec") if "def cost(" in path.read_text()}


def imports(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def third_party(folder: str) -> set[str]:
    roots = {name.split(".")[0] for path in sources(folder) for name in imports(path)}
    return roots - set(sys.stdlib_module_names) - {"ddtree_numba"}


def readme_commands() -> list[str]:
    """The commands of the first screen: the content of its `sh` blocks."""
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    return re.findall(r"^```sh\n(.*?)\n```$", screen, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative_and_lead_to_the_neighbours(name):
    link = ROOT / "ddtree_numba" / name
    assert link.is_symlink() and str(link.readlink()) == LINKS[name]
    assert link.is_dir()


def test_every_operation_has_its_four_files():
    tests = {path.stem.removeprefix("test_") for path in sources("tests")}
    assert operations(), "no specification found"
    assert operations() <= tests, f"no test for {sorted(operations() - tests)}"
    kernels = stems("kernels") - KERNEL_TOOLS
    assert kernels <= operations(), f"no specification of {sorted(kernels - operations())}"
    benches = {name.removeprefix("bench_") for name in stems("bench")}
    assert kernels <= benches, f"no bench for {sorted(kernels - benches)}"


@pytest.mark.parametrize("name", sorted(operations()))
def test_a_specification_exports_what_tests_and_benches_take_from_it(name):
    spec = import_module(f"ddtree_numba.spec.{name}")
    for attribute in (name, "CASES", "TOLERANCE", "inputs", "cost"):
        assert hasattr(spec, attribute), f"spec/{name}.py has no {attribute}"
    assert spec.__doc__ or getattr(spec, name).__doc__


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_is_read_in_one_sitting(folder):
    long = {
        path.name: n
        for path in sources(folder)
        if (n := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long
    assert not (ROOT / folder / "utils.py").exists()


@pytest.mark.parametrize("folder", REACH)
def test_no_module_imports_upwards(folder):
    for path in sources(folder):
        own = {name.split(".")[1] for name in imports(path) if name.startswith("ddtree_numba.")}
        assert own <= REACH[folder], f"{path.name} imports {sorted(own - REACH[folder])}"


def test_specifications_need_numpy_alone():
    assert third_party("spec") <= SPEC_PACKAGES


@pytest.mark.parametrize("folder", ["spec", "kernels", "model"])
def test_package_folders_import_nothing_by_themselves(folder):
    assert not imports(ROOT / folder / "__init__.py")


def test_dependencies_are_what_the_package_imports():
    declared = {re.split(r"[<>=\[]", line)[0] for line in PROJECT["project"]["dependencies"]}
    used = set().union(*(third_party(folder) for folder in ("spec", "model", "ddtree_numba")))
    assert used == declared


def test_built_package_holds_every_module_and_the_embedded_model(embedded):
    setuptools = PROJECT["tool"]["setuptools"]
    folders = {
        "ddtree_numba" if name == "ddtree_numba" else name for name in setuptools["packages"]
    }
    assert folders == {"ddtree_numba"} | {
        f"ddtree_numba.{name}" for name in LINKS if name != "tiny"
    }
    package = ROOT / "ddtree_numba"
    patterns = setuptools["package-data"]["ddtree_numba"]
    shipped = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    present = {
        package / "tiny" / path.relative_to(embedded)
        for path in embedded.rglob("*")
        if path.is_file()
    }
    assert present and shipped == present


def test_embedded_model_is_small_enough_for_a_repository(embedded):
    assert sum(path.stat().st_size for path in embedded.rglob("*")) <= MAX_EMBEDDED_BYTES


def test_readme_starts_with_the_two_commands_that_ci_runs():
    run, test = readme_commands()
    for command in (run, test):
        assert "\n" not in command and command.startswith("python3 -m venv .venv && ")
    assert "-m ddtree_numba.generate" in run and "-m pytest" in test
    script = (ROOT / ".ci" / "run").read_text()
    assert "readme_command 1" in script and "readme_command 2" in script
    assert "pytest" not in script, "CI takes the test command from the README"
