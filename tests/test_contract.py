"""The shape of the repository: one operation, one name, everywhere; no upward imports; short files;
case ids that a table explains.

Every rule is a function of a folder that returns what breaks it, and is shown a folder that does.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = [
    *("draft_topk", "tree_build", "tree_size", "tree_links", "tree_mask"),
    "tree_accept",
    *("cache_commit", "next_token", "round_advance"),
    *("embed", "rms_norm", "rope", "linear", "absorb", "kv_append", "tree_attention", "router"),
    *("moe_int4", "swiglu", "all_reduce", "all_gather"),
    *("norm_rope_append", "absorb_rope", "linear_swiglu", "qk_norm_rope"),  # composed of those
    "draft_attention",
]
SHARED = {"numerics", "noise"}  # modules of spec/ that are no operations
MACHINERY = {"ptx", "launch", "simt"}  # modules of kernels/ that are never operations
LAYERS = ("spec", "kernels", "model", "ddtree_numba")  # each may import itself and those before it
FOLDERS = (*LAYERS, "tests", "golden", "bench")
LINES = 300
SPEC_MAY_IMPORT = {
    *("numpy", "ml_dtypes", "ddtree_numba"),
    *("collections", "dataclasses", "functools", "heapq", "itertools", "math", "typing"),
}


def stems(folder):
    return {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}


def sources(folder):
    """Python files of a folder; a link to another folder is not followed."""
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if path.is_symlink():
            continue
        if path.is_dir():
            yield from sources(path)
        elif path.suffix == ".py":
            yield path


def imports(path):
    """(module, level) of every import, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module, node.level
            if module == "ddtree_numba":
                yield from ((f"{module}.{alias.name}", node.level) for alias in node.names)


def layer_of(module):
    """Index in LAYERS of an import name, None for one from elsewhere."""
    parts = module.split(".")
    if parts[0] != "ddtree_numba":
        return None
    # `from ddtree_numba import spec` is judged by the second name that `imports` yields for it
    if len(parts) == 1:
        return 0
    return LAYERS.index(parts[1]) if parts[1] in LAYERS else len(LAYERS) - 1


def kernel_operations(folder):
    """Kernel files named after an operation, or after a function of their own."""
    for stem in sorted(stems(folder) - MACHINERY):
        tree = ast.parse((folder / f"{stem}.py").read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if stem in OPERATIONS or stem in functions:
            yield stem


def missing_files(root):
    """Operations without a specification, specifications without a test, kernels without either."""
    specs, tests = stems(root / "spec") - SHARED, stems(root / "tests")
    benches, kernels = stems(root / "bench"), set(kernel_operations(root / "kernels"))
    wrong = [f"spec/{stem}.py" for stem in sorted(set(OPERATIONS) - specs)]
    wrong += [f"tests/test_{stem}.py" for stem in sorted(specs) if f"test_{stem}" not in tests]
    wrong += [f"spec/{stem}.py" for stem in sorted(kernels - specs)]
    return wrong + [f"bench/bench_{s}.py" for s in sorted(kernels) if f"bench_{s}" not in benches]


def long_files(root):
    counts = {
        path: len(path.read_text().splitlines()) for f in FOLDERS for path in sources(root / f)
    }
    return [f"{path.relative_to(root)}: {n}" for path, n in counts.items() if n > LINES]


def upward_imports(root):
    """Imports of a later layer, relative imports, and anything in spec/ beyond numpy."""
    wrong = []
    for layer, folder in enumerate(LAYERS):
        for path in sources(root / folder):
            for module, level in imports(path):
                above = (layer_of(module) or 0) > layer
                foreign = folder == "spec" and module.split(".")[0] not in SPEC_MAY_IMPORT
                if above or foreign or level:
                    wrong.append(f"{path.relative_to(root)}: {'.' * level}{module}")
    return wrong


def unexplained(root):
    """Ids in the names of tests that have no row in tests/CASES.md, and rows that have no test."""
    files = sorted((root / "tests").glob("test_*.py"))
    named = {i for f in files for i in re.findall(r"^def test_([a-z]\d\d)_", f.read_text(), re.M)}
    rows = set(re.findall(r"^\| ([a-z]\d\d) \|", (root / "tests/CASES.md").read_text(), re.M))
    return sorted(named - {"k26"} ^ rows)  # k26 is the model


def test_every_operation_has_its_files():
    assert not missing_files(ROOT)


def test_files_are_short():
    assert not long_files(ROOT)


def test_every_case_id_is_explained():
    assert not unexplained(ROOT)


def test_no_module_imports_upwards():
    assert not upward_imports(ROOT)


@pytest.mark.parametrize("folder", ["spec", "model"])
def test_packages_import_nothing_by_themselves(folder):
    assert not list(imports(ROOT / folder / "__init__.py"))


@pytest.fixture
def toy(tmp_path):
    """A repository that obeys: every operation specified and tested, one kernel with its bench."""
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    for stem in OPERATIONS:
        (tmp_path / f"spec/{stem}.py").write_text("import numpy as np\n")
        (tmp_path / f"tests/test_{stem}.py").touch()
    (tmp_path / "kernels/rope.py").write_text("from ddtree_numba.spec.rope import rope\n")
    (tmp_path / "bench/bench_rope.py").touch()
    (tmp_path / "ddtree_numba/spec").symlink_to("../spec")
    assert not missing_files(tmp_path) + long_files(tmp_path) + upward_imports(tmp_path)
    return tmp_path


@pytest.mark.parametrize("gone", ["spec/rope.py", "tests/test_rope.py", "bench/bench_rope.py"])
def test_a_missing_file_would_be_seen(toy, gone):
    (toy / gone).unlink()
    assert gone in missing_files(toy)


def test_a_kernel_without_a_specification_would_be_seen(toy):
    (toy / "kernels/arguments.py").write_text("def pack(values): ...\n")
    (toy / "kernels/fused.py").write_text("def fused(x, out): ...\n")
    assert missing_files(toy) == ["spec/fused.py", "bench/bench_fused.py"]


def test_a_long_file_would_be_seen(toy):
    (toy / "model/deep").mkdir()
    (toy / "model/deep/config.py").write_text("x = 1\n" * 301)
    (toy / "model/names.py").write_text("x = 1\n" * 300)
    assert long_files(toy) == ["model/deep/config.py: 301"]


def test_an_id_without_a_row_would_be_seen(toy):
    (toy / "tests/CASES.md").write_text(
        "| id | the fault |\n|---|---|\n| s01 | .. |\n| s02 | .. |\n"
    )
    (toy / "tests/test_rope.py").write_text("def test_s01_a(): ...\ndef test_k26_b(): ...\n")
    assert unexplained(toy) == ["s02"]
    with (toy / "tests/test_rope.py").open("a") as file:
        file.write("def test_s02_c(): ...\ndef test_m04_d(): ...\n")
    assert unexplained(toy) == ["m04"]


@pytest.mark.parametrize(
    "file, line",
    [
        ("spec/rope.py", "import torch"),
        ("spec/rope.py", "from ddtree_numba.model.config import ModelConfig"),
        ("spec/rope.py", "def f():\n    from ddtree_numba.kernels import rope"),
        ("kernels/rope.py", "import ddtree_numba.model.target"),
        ("model/target.py", "from ddtree_numba.engine import Engine"),
        ("model/target.py", "from ddtree_numba import engine"),
        ("model/target.py", "from .config import ModelConfig"),
    ],
)
def test_an_upward_import_would_be_seen(toy, file, line):
    (toy / file).write_text(line + "\n")
    assert len(upward_imports(toy)) >= 1
    assert all(entry.startswith(file) for entry in upward_imports(toy))


@pytest.mark.parametrize(
    "file, line",
    [
        ("spec/rope.py", "from ddtree_numba.spec.numerics import matvec"),
        ("model/target.py", "from ddtree_numba.spec import rope"),
        ("ddtree_numba/engine.py", "from ddtree_numba.model.target import Target\nimport tqdm"),
        ("ddtree_numba/engine.py", "import ddtree_numba"),
    ],
)
def test_a_downward_import_is_allowed(toy, file, line):
    (toy / file).write_text(line + "\n")
    assert not upward_imports(toy)
