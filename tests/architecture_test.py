"""The rules of the house that a machine can check: import direction, file length, an honest map in the README."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# A room may import from rooms with lower numbers and from itself. Only `pallas_kernels` and `runtime` import none.
LEVELS = {
    "pallas_kernels": 0,
    "cubit_jax.runtime": 0,
    "cubit_jax.ops": 1,
    "cubit_jax.data": 1,
    "cubit_jax.partitioning": 2,
    "cubit_jax.layers": 3,
    "cubit_jax.flops": 4,
    "cubit_jax.model": 4,
    "cubit_jax.inference": 5,
    "cubit_jax.training": 6,
    "cubit_jax.planning": 5,
    "cubit_jax": 7,
    "experiments": 8,
}
MAX_FILES = 12  # in a room, __init__.py not counted
SHIPPED = ("cubit_jax", "pallas_kernels", "configs", "experiments")
SOURCES = sorted(path for folder in (*SHIPPED, "tests") for path in (ROOT / folder).rglob("*.py"))


def _in(path, *folders):
    return path.relative_to(ROOT).parts[0] in folders


def _level(module):
    names = [name for name in LEVELS if module == name or module.startswith((f"{name}.", f"{name}_"))]
    return LEVELS[max(names, key=len)] if names else None


def _room(module):
    """The first key of LEVELS that a module belongs to."""
    return max((name for name in LEVELS if f"{module}.".startswith((f"{name}.", f"{name}_"))), key=len)


def _imports(path):
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            yield from (f"{base}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if _in(p, "cubit_jax", "pallas_kernels", "experiments")],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_imports_go_one_way(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for name in _imports(path):
        level = _level(name)
        assert level is None or level < _level(module) or _room(name) == _room(module), (
            f"{module} must not import {name}"
        )
        if module.startswith("cubit_jax.ops"):
            assert not name.startswith(("flax", "ml_collections")), f"{module} must not import {name}"
        if module.startswith("cubit_jax"):
            assert not name.startswith("configs"), f"{module} must not import {name}: a config is data"


def test_configs_import_only_ml_collections_and_each_other():
    for path in (ROOT / "configs").glob("*.py"):
        for name in _imports(path):
            assert name.startswith(("ml_collections", "configs")), f"{path.name} must not import {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_stay_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{lines} lines: a file above 400 does two things"


def test_every_room_and_program_is_in_the_readme_map():
    text = (ROOT / "README.md").read_text().partition("## Map")[2].partition("\n## ")[0]
    modules = [p for p in SOURCES if _in(p, *SHIPPED) and p.name != "__init__.py"]
    rooms = {p.parent.name for p in modules}
    programs = {p.name for p in modules if '__name__ == "__main__"' in p.read_text()}
    missing = [name for name in rooms | programs if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert rooms and programs and not missing, f"not in the README's map: {missing}"


def test_rooms_stay_small():
    for folder in {path.parent for path in SOURCES if _in(path, *SHIPPED)}:
        files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MAX_FILES, f"{folder.relative_to(ROOT)} has {len(files)} files: make rooms of it"
