"""The package's layers: folders import only from lower folders; files of one form no cycles."""

import ast
import sys
from pathlib import Path

import pytest

import spmd_core as spmd

SOURCE = Path(spmd.__file__).parent
sys.path.append(str(SOURCE.parents[3] / "scripts"))
import import_graph  # noqa: E402 - a script of the repository, outside of any package

# From top to bottom. Folders on one line do not import each other.
LAYERS = [
    ("plan", "distributed", "dtensor", "former_names"),
    ("auto",),
    ("planner", "dynamo", "checkpoint"),
    ("metrics", "modules", "steps"),
    ("torch_backend", "marks", "control_flow"),
    ("dispatch", "debugging", "manual"),
    ("recording",),
    ("tensor",),
    ("program",),
    ("graph", "runtime"),
    ("sharding", "ops", "counters", "chips", "checkpoint_options"),
    (
        "arguments",
        "command_line",
        "errors",
        "config",
        "dtypes",
        "files",
        "progress",
        "releases",
        "source_lines",
        "version",
    ),
]
FILES = import_graph.file_imports(SOURCE)
FOLDERS = import_graph.folder_imports(FILES)


def test_every_folder_has_its_layer():
    assert {folder for layer in LAYERS for folder in layer} | {"__init__"} == set(FOLDERS)


def test_a_folder_imports_only_from_lower_layers():
    layer_of = {folder: number for number, layer in enumerate(LAYERS) for folder in layer}
    for folder, targets in FOLDERS.items():
        if folder != "__init__":
            assert {t for t in targets if layer_of[t] <= layer_of[folder]} == set(), folder


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_no_cycle_inside_a_folder(folder):
    inside = {
        file: {t for t in targets if import_graph.folder_of(t) == folder}
        for file, targets in FILES.items()
        if import_graph.folder_of(file) == folder
    }
    assert import_graph.cycles(inside) == []


def test_a_cycle_is_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert import_graph.cycles(imports) == [["a", "b", "c"]]
    with pytest.raises(ValueError, match="folders that import each other have no layer"):
        import_graph.layers(imports)
    assert import_graph.layers({"a": {"b"}, "b": set()}) == {"a": 2, "b": 1}


def test_a_folder_says_its_purpose_and_nothing_else():
    for init in SOURCE.rglob("*/__init__.py"):
        lines = init.read_text().splitlines()
        assert lines[0].startswith('"""') and len(lines[0]) <= 100, init
        # These export names for users.
        if init.parent.name not in ("checkpoint", "control_flow", "debugging", "manual", "metrics"):
            assert len(lines) == 1, init


def test_a_family_of_operations_registers_and_imports_no_other():
    for file, targets in FILES.items():
        folder = Path(file).parent.as_posix()
        registers = "@lowering(" in (text := (SOURCE / file).read_text()) or "register(" in text
        if folder == "ops" and Path(file).stem not in ("__init__", "registry"):
            assert registers, f"{file} registers no overload: it belongs to ops/kernels"
            assert all(t.startswith(("ops/kernels/", "ops/registry")) for t in targets if "/" in t)
        if folder == "ops/kernels":
            assert not registers, f"{file} registers an overload: it belongs to ops"


def test_the_values_import_numpy_and_the_standard_library_only():
    for path in (SOURCE / "sharding").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            tops = {name.split(".")[0] for name in names} - sys.stdlib_module_names
            assert tops <= {"numpy", "spmd_core"}, path
