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
FLOORS = [
    ("plan", "distributed", "dtensor", "former_names"),
    ("planner",),
    ("metrics", "modules", "steps"),
    ("torch_backend", "marks"),
    ("dispatch", "debugging", "manual"),
    ("recording",),
    ("tensor",),
    ("program",),
    ("graph", "runtime"),
    ("sharding", "ops", "counters"),
    (
        "arguments",
        "chips",
        "errors",
        "config",
        "dtypes",
        "files",
        "releases",
        "source_lines",
    ),
]
FILES = import_graph.file_arrows(SOURCE)
ROOMS = import_graph.room_arrows(FILES)


def test_every_room_has_its_place():
    assert {room for floor in FLOORS for room in floor} | {"__init__"} == set(ROOMS)


def test_a_room_imports_only_from_rooms_below():
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    for room, targets in ROOMS.items():
        if room != "__init__":
            assert {t for t in targets if floor_of[t] <= floor_of[room]} == set(), room


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_no_circle_inside_a_room(room):
    inside = {
        file: {t for t in targets if import_graph.room_of(t) == room}
        for file, targets in FILES.items()
        if import_graph.room_of(file) == room
    }
    assert import_graph.circles(inside) == []


def test_a_circle_is_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert import_graph.circles(arrows) == [["a", "b", "c"]]
    with pytest.raises(ValueError, match="rooms that import each other have no floor"):
        import_graph.floors(arrows)
    assert import_graph.floors({"a": {"b"}, "b": set()}) == {"a": 2, "b": 1}


def test_a_folder_says_its_purpose_and_nothing_else():
    for init in SOURCE.rglob("*/__init__.py"):
        lines = init.read_text().splitlines()
        assert lines[0].startswith('"""') and len(lines[0]) <= 100, init
        # These export names for users.
        if init.parent.name not in ("debugging", "manual", "metrics"):
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
