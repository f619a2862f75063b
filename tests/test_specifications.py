"""Specifications that look alike and export what tests and benches need.

Each rule of style takes a folder and returns what breaks it, and is shown one that does.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from ddtree_numba.spec.numerics import Cost
from tests.cases import small

FOLDER = Path(__file__).resolve().parents[1] / "spec"
SHARED = {"__init__", "numerics", "noise"}  # modules that are no operations
OPERATIONS = sorted({path.stem for path in FOLDER.glob("*.py")} - SHARED)
PARAGRAPHS = ("Rounding", "Errors", "Source")  # that end a docstring


def trees(folder):
    """(name of the operation, syntax tree) of every specification."""
    for path in sorted(folder.glob("*.py")):
        if path.stem not in SHARED:
            yield path.stem, ast.parse(path.read_text())


def undocumented(folder):
    """Parameters without a row in the docstring's table; paragraphs that a docstring lacks."""
    wrong = []
    for stem, tree in trees(folder):
        text = ast.get_docstring(tree) or ""
        rows = re.findall(r"^\| (.+?) +\|", text, re.M)
        documented = {name for row in rows for name in row.split(", ")}
        functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == stem]
        arguments = functions[-1].args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        wrong += [f"{stem}: {p.arg}" for p in parameters if p.arg not in documented]
        wrong += [f"{stem}: {p}" for p in PARAGRAPHS if not re.search(rf"^{p}: \S", text, re.M)]
    return wrong


def names(tree):
    """What a module defines, in its order."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield ast.unparse(node.targets[0])
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)


def disordered(folder):
    """Specifications whose parts stand in another order; costs whose two numbers have no names."""
    wrong = []
    for stem, tree in trees(folder):
        parts = ["TOLERANCE", stem, "CASES", "inputs", "cost"]
        if list(dict.fromkeys(name for name in names(tree) if name in parts)) != parts:
            wrong.append(f"{stem}: order")
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        wrong += [f"{stem}: Cost" for c in calls if ast.unparse(c.func) == "Cost" and c.args]
    return wrong


def test_every_parameter_is_documented():
    assert not undocumented(FOLDER)


def test_all_have_one_order():
    assert not disordered(FOLDER)


@pytest.mark.parametrize("stem", OPERATIONS)
def test_all_export_what_tests_and_benches_need(stem):
    spec = importlib.import_module(f"ddtree_numba.spec.{stem}")
    assert small(spec.CASES), "named edge cases"
    assert len(small(spec.CASES)) < len(spec.CASES), "a case of published size, named k26..."
    assert spec.TOLERANCE == 0 or set(spec.TOLERANCE) == {"rtol", "atol"}
    parameters = inspect.signature(getattr(spec, stem)).parameters.values()
    required = {p.name for p in parameters if p.default is inspect.Parameter.empty}
    for name, case in spec.CASES.items():
        cost = spec.cost(case)
        assert isinstance(cost, Cost) and cost.bytes >= 0 and cost.flops >= 0, name
    for name in small(spec.CASES):
        arguments = spec.inputs(spec.CASES[name], np.random.default_rng(0))
        assert required <= set(arguments) <= {p.name for p in parameters}, name


@pytest.mark.parametrize("stem", OPERATIONS)
def test_inputs_follow_from_the_generator_alone(stem):
    spec = importlib.import_module(f"ddtree_numba.spec.{stem}")
    case = spec.CASES[small(spec.CASES)[0]]
    one, two = (spec.inputs(case, np.random.default_rng(7)) for _ in range(2))
    for name, value in one.items():
        if isinstance(value, np.ndarray):
            assert value.tobytes() == two[name].tobytes(), name


TOY = '''"""y = x.

| name | shape | dtype, meaning |
|------|-------|----------------|
| x, y | [T]   | float32        |

Rounding: none.
Errors: none.
Source: none.
"""
TOLERANCE = 0
def toy(x, y): ...
CASES: dict = dict()
def inputs(case, rng): ...
def cost(case): return Cost(bytes=0, flops=0)
'''


@pytest.mark.parametrize(
    "rule, good, bad, missed",
    [
        (undocumented, "x, y |", "x    |", "y"),
        (undocumented, "(x, y)", "(x, y, *, scale=1.0)", "scale"),
        (undocumented, "Errors: none.\n", "", "Errors"),
        (undocumented, "Source: none.", "Source:", "Source"),
        (undocumented, "Rounding: none.", "No Rounding: none.", "Rounding"),
        (disordered, "TOLERANCE = 0\ndef toy(x, y): ...", "def toy(): ...\nTOLERANCE = 0", "order"),
        (disordered, "CASES: dict = dict()\n", "", "order"),
        (disordered, "bytes=0, flops=0", "0, flops=0", "Cost"),
    ],
)
def test_another_style_would_be_seen(tmp_path, rule, good, bad, missed):
    (tmp_path / "toy.py").write_text(TOY)
    assert not rule(tmp_path) and TOY.count(good) == 1
    (tmp_path / "toy.py").write_text(TOY.replace(good, bad))
    assert rule(tmp_path) == [f"toy: {missed}"]
