"""What gets built and installed: links, modules, data, dependencies; the README's two commands."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = {"spec": "../spec", "kernels": "../kernels", "model": "../model", "tiny": "../golden/tiny"}
SCREEN = 40  # lines of the README that a reader sees first
MAX_EMBEDDED_BYTES = 16_000_000
EXTRA = {"cupy", "cupyx"}  # of cu13, imported where a GPU is used


def third_party(folder: str) -> set[str]:
    """Top-level names that a folder's files import and that neither Python nor this project has."""
    found = set()
    for path in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"ddtree_numba", "golden", "tests"}


def names(requirements: list[str]) -> set[str]:
    """Import names of requirements; here they differ from the package names in the dash alone."""
    return {re.split(r"[<>=\[]", line)[0].replace("-", "_") for line in requirements}


@pytest.mark.parametrize("name", LINKS)
def test_links_are_relative_and_lead_to_the_neighbours(name):
    link = ROOT / "ddtree_numba" / name
    assert link.is_symlink() and str(link.readlink()) == LINKS[name]
    assert link.is_dir()


def test_every_folder_of_modules_is_packaged():
    package = ROOT / "ddtree_numba"
    folders = [package, *(path for path in package.iterdir() if (path / "__init__.py").exists())]
    expected = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == expected
    assert not list(package.glob("*/*/__init__.py")), "nested packages are not listed"


def test_package_data_is_the_embedded_model(embedded):
    package = ROOT / "ddtree_numba"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["ddtree_numba"]
    shipped = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    present = {path.relative_to(embedded) for path in embedded.rglob("*") if path.is_file()}
    assert {path.relative_to(package / "tiny") for path in shipped} == present
    assert Path("config.json") in present and Path("drafter/config.json") in present


def test_embedded_model_is_small_enough_for_a_repository(embedded):
    assert sum(path.stat().st_size for path in embedded.rglob("*")) <= MAX_EMBEDDED_BYTES


def test_dependencies_are_what_the_package_imports():
    used = set().union(*(third_party(folder) for folder in ("spec", "model", "ddtree_numba")))
    assert used - EXTRA == names(PROJECT["project"]["dependencies"])


def test_readme_starts_with_the_two_commands_that_ci_runs():
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:SCREEN])
    run, test = re.findall(r"^```sh\n(.*?)\n```$", screen, re.MULTILINE | re.DOTALL)
    for command in (run, test):
        assert "\n" not in command and command.startswith("python3 -m venv .venv && ")
    assert "-m ddtree_numba.generate" in run and "-m pytest" in test
    script = (ROOT / ".ci" / "run").read_text()
    assert "readme_command 1" in script and "readme_command 2" in script
    assert "-m pytest" not in script, "CI takes the test command from the README"
