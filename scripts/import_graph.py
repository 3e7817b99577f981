"""Prints a package's import graph: rooms, their floors, and the arrows and circles between them.

A room is a folder of the package, or a file directly in the package's folder. An arrow is an
import. A room is one floor above the highest room that it imports; a room on floor 1 imports none.
A circle is a set of rooms or files that import each other. `tests/system/test_rooms.py` checks the
result.
"""

import argparse
import ast
from collections import Counter, defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "packages" / "spmd-core" / "src" / "spmd_core"
Arrows = dict[str, set[str]]


def file_arrows(source: Path) -> Arrows:
    """The imports inside a package: for each file, such as `ops/norm.py`, the imported files."""
    return {
        path.relative_to(source).as_posix(): {
            target for name in _imported(path, source) if (target := _file_of(name, source))
        }
        for path in sorted(source.rglob("*.py"))
    }


def _imported(path: Path, source: Path) -> set[str]:
    """Dotted names inside the package that a file imports; the last part may be no module."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == source.name:
            inner = (node.module or "").split(".")[1:]
            names |= {".".join([*inner, alias.name]) for alias in node.names}
        elif isinstance(node, ast.Import):
            own = [alias.name for alias in node.names if alias.name.split(".")[0] == source.name]
            names |= {name.partition(".")[2] for name in own}
    return names


def _file_of(name: str, source: Path) -> str | None:
    """The file of a dotted name: of the module, or of the module that defines its last part."""
    parts = name.split(".") if name else []
    while parts:
        base = source.joinpath(*parts)
        if base.with_suffix(".py").is_file():
            return base.with_suffix(".py").relative_to(source).as_posix()
        if (base / "__init__.py").is_file():
            return (base / "__init__.py").relative_to(source).as_posix()
        parts.pop()
    return None


def room_of(file: str) -> str:
    """`ops` for `ops/norm.py`; `errors` for `errors.py`."""
    return file.split("/")[0].removesuffix(".py")


def room_arrows(files: Arrows) -> Arrows:
    """The imports between rooms: for each room, the rooms that its files import."""
    rooms: Arrows = defaultdict(set)
    for file, targets in files.items():
        rooms[room_of(file)] |= {room_of(target) for target in targets} - {room_of(file)}
    return dict(rooms)


def circles(arrows: Arrows) -> list[list[str]]:
    """Strongly connected components of at least two nodes: the import cycles."""
    reach: Arrows = {}
    for start in arrows:
        seen, stack = set(), list(arrows[start])
        while stack:
            here = stack.pop()
            if here not in seen:
                seen.add(here)
                stack.extend(arrows.get(here, ()))
        reach[start] = seen
    found = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in arrows}
    return [list(circle) for circle in sorted(found) if len(circle) > 1]


def floors(arrows: Arrows) -> dict[str, int]:
    """The floor of each room. Raises ValueError if rooms import each other."""
    found = circles(arrows)
    if found:
        raise ValueError(f"rooms that import each other have no floor; got {found}. Open them.")
    floor: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in floor:
            floor[room] = 1 + max((of(other) for other in arrows[room]), default=0)
        return floor[room]

    for room in arrows:
        of(room)
    return floor


def purpose(source: Path, room: str) -> str:
    """The purpose of a room: the first line of its docstring."""
    path = source / room / "__init__.py" if (source / room).is_dir() else source / f"{room}.py"
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", nargs="?", type=Path, default=SOURCE, help="a package's folder")
    parser.add_argument("--arrows", action="store_true", help="also list each room's arrows")
    options = parser.parse_args()
    files = file_arrows(options.source)
    rooms = room_arrows(files)
    inside = {
        room: {
            f: {t for t in targets if room_of(t) == room}
            for f, targets in files.items()
            if room_of(f) == room
        }
        for room in rooms
    }
    num_files = Counter(map(room_of, files))
    lines = {
        room: sum(
            len((options.source / f).read_text().splitlines()) for f in files if room_of(f) == room
        )
        for room in rooms
    }
    floor = floors(rooms) if not circles(rooms) else dict.fromkeys(rooms, 0)
    print("| floor | room | files | lines | imports rooms | purpose |\n|---|---|---|---|---|---|")
    for room in sorted(rooms, key=lambda name: (-floor[name], name)):
        sentence = purpose(options.source, room)
        print(
            f"| {floor[room]} | {room} | {num_files[room]} | {lines[room]} "
            f"| {len(rooms[room])} | {sentence} |"
        )
    num_arrows = sum(map(len, files.values()))
    print(
        f"\n{len(rooms)} rooms on {max(floor.values())} floors, "
        f"{sum(map(len, rooms.values()))} arrows "
        f"between rooms; {len(files)} files, {num_arrows} arrows between files."
    )
    between, within = circles(rooms), [c for arrows in inside.values() for c in circles(arrows)]
    print(f"Circles of rooms: {between or 'none'}. Circles of files in a room: {within or 'none'}.")
    if options.arrows:
        for room in sorted(rooms, key=lambda name: -floor[name]):
            print(f"{room} -> {', '.join(sorted(rooms[room])) or 'nothing'}")


if __name__ == "__main__":
    main()
