"""Prints a package's import graph: its folders by layers, the imports between them, and cycles.

A file directly in the package's folder counts as a folder of its own. A folder is one layer above
the highest folder that it imports; a folder on layer 1 imports none. A cycle is a set of folders or
files that import each other. `tests/system/test_layers.py` checks the result.
"""

import argparse
import ast
from collections import Counter, defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "packages" / "spmd-core" / "src" / "spmd_core"
Imports = dict[str, set[str]]


def file_imports(source: Path) -> Imports:
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


def folder_of(file: str) -> str:
    """`ops` for `ops/norm.py`; `errors` for `errors.py`."""
    return file.split("/")[0].removesuffix(".py")


def folder_imports(files: Imports) -> Imports:
    """The imports between folders: for each folder, the folders that its files import."""
    folders: Imports = defaultdict(set)
    for file, targets in files.items():
        folders[folder_of(file)] |= {folder_of(target) for target in targets} - {folder_of(file)}
    return dict(folders)


def cycles(imports: Imports) -> list[list[str]]:
    """Strongly connected components of at least two nodes: the import cycles."""
    reach: Imports = {}
    for start in imports:
        seen, stack = set(), list(imports[start])
        while stack:
            here = stack.pop()
            if here not in seen:
                seen.add(here)
                stack.extend(imports.get(here, ()))
        reach[start] = seen
    found = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in imports}
    return [list(cycle) for cycle in sorted(found) if len(cycle) > 1]


def layers(imports: Imports) -> dict[str, int]:
    """The layer of each folder. Raises ValueError if folders import each other."""
    found = cycles(imports)
    if found:
        raise ValueError(
            f"folders that import each other have no layer; got {found}. Break the cycle."
        )
    layer: dict[str, int] = {}

    def of(folder: str) -> int:
        if folder not in layer:
            layer[folder] = 1 + max((of(other) for other in imports[folder]), default=0)
        return layer[folder]

    for folder in imports:
        of(folder)
    return layer


def purpose(source: Path, folder: str) -> str:
    """The purpose of a folder: the first line of its docstring."""
    path = (
        source / folder / "__init__.py" if (source / folder).is_dir() else source / f"{folder}.py"
    )
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", nargs="?", type=Path, default=SOURCE, help="a package's folder")
    parser.add_argument("--imports", action="store_true", help="also list what each folder imports")
    options = parser.parse_args()
    if not (options.source / "__init__.py").is_file():
        parser.error(
            f"the source must be a package's folder; got {options.source}, which has no "
            "__init__.py. Correct its path, or leave it out."
        )
    files = file_imports(options.source)
    folders = folder_imports(files)
    inside = {
        folder: {
            f: {t for t in targets if folder_of(t) == folder}
            for f, targets in files.items()
            if folder_of(f) == folder
        }
        for folder in folders
    }
    num_files = Counter(map(folder_of, files))
    lines = {
        folder: sum(
            len((options.source / f).read_text().splitlines())
            for f in files
            if folder_of(f) == folder
        )
        for folder in folders
    }
    layer = layers(folders) if not cycles(folders) else dict.fromkeys(folders, 0)
    print(
        "| layer | folder | files | lines | imports folders | purpose |\n|---|---|---|---|---|---|"
    )
    for folder in sorted(folders, key=lambda name: (-layer[name], name)):
        sentence = purpose(options.source, folder)
        print(
            f"| {layer[folder]} | {folder} | {num_files[folder]} | {lines[folder]} "
            f"| {len(folders[folder])} | {sentence} |"
        )
    num_imports = sum(map(len, files.values()))
    print(
        f"\n{len(folders)} folders on {max(layer.values())} layers, "
        f"{sum(map(len, folders.values()))} imports "
        f"between folders; {len(files)} files, {num_imports} imports between files."
    )
    between, within = cycles(folders), [c for imports in inside.values() for c in cycles(imports)]
    print(
        f"Cycles of folders: {between or 'none'}. Cycles of files in a folder: {within or 'none'}."
    )
    if options.imports:
        for folder in sorted(folders, key=lambda name: -layer[name]):
            print(f"{folder} -> {', '.join(sorted(folders[folder])) or 'nothing'}")


if __name__ == "__main__":
    main()
