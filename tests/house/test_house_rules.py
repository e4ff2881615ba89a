"""The rules that keep the house simple: who imports whom, how long things are, what is not written."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("kernels", "plugin", "cluster")
FORBIDDEN_IMPORTS = {
    "kernels": ("vllm", "ray", "grpc", "npufleet.plugin", "npufleet.cluster"),
    "plugin": ("ray", "grpc", "npufleet.cluster"),
    "cluster": ("torch_npu", "npufleet.plugin", "npufleet.kernels"),
}
SUPERVISED = re.compile(r"#\s*noqa:\s*BLE001\s+\S+")


def tracked(*suffixes: str) -> list[Path]:
    """Files of the repository with one of the suffixes, as git knows them (new ones included)."""
    out = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    return [ROOT / f for f in out if f.endswith(suffixes) and (ROOT / f).is_file()]


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file. No garbage is collected meanwhile: CPython 3.11's parser does not stand being re-entered."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()


def library_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


PYTHON = tracked(".py")
LIBRARY_PYTHON = [p for p in PYTHON if library_of(p) in LIBRARIES]


def ident(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_names(tree: ast.AST, package: str) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # relative: resolve against the package of the file
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            names.append(base)
            names += [f"{base}.{a.name}" for a in node.names]
    return names


@pytest.mark.parametrize("path", LIBRARY_PYTHON, ids=ident)
def test_imports_point_down(path: Path) -> None:
    library = library_of(path)
    package = "npufleet." + ".".join(path.relative_to(ROOT).parts[:-1])
    tree = tree_of(path)
    for name in imported_names(tree, package):
        for bad in FORBIDDEN_IMPORTS[library]:
            assert name != bad and not name.startswith(bad + "."), f"{ident(path)} imports {name}"


@pytest.mark.parametrize("path", tracked(".py", ".cpp", ".h"), ids=ident)
def test_file_and_function_sizes(path: Path) -> None:
    text = path.read_text()
    limit = 600 if library_of(path) in ("tests", "benchmarks") else 400
    assert text.count("\n") <= limit, f"{ident(path)}: over {limit} lines, two ideas in one file?"
    if path.suffix != ".py":
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 80, f"{ident(path)}:{node.lineno} {node.name} has {length} lines"


def test_median_file_is_small() -> None:
    sizes = sorted(n for p in LIBRARY_PYTHON if (n := p.read_text().count("\n")) > 2)
    assert sizes[len(sizes) // 2] <= 140, sizes


@pytest.mark.parametrize("path", LIBRARY_PYTHON, ids=ident)
def test_no_broad_except_outside_supervisors(path: Path) -> None:
    lines = path.read_text().split("\n")
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or (
            isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        )
        if broad:
            line = lines[node.lineno - 1]
            assert SUPERVISED.search(line), f"{ident(path)}:{node.lineno}: broad except without its reason"


@pytest.mark.parametrize("path", LIBRARY_PYTHON, ids=ident)
def test_no_patch_outside_overrides(path: Path) -> None:
    if ident(path) == "plugin/overrides.py":
        return
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                text = ast.unparse(target)
                foreign = re.match(r"(vllm|torch|torch_npu|transformers|ray|grpc)\b", text)
                assert not foreign, f"{ident(path)}:{node.lineno} rebinds {text}"


@pytest.mark.parametrize("path", [p for p in LIBRARY_PYTHON if library_of(p) == "plugin"], ids=ident)
def test_plugin_never_asks_whether_the_npu_is_virtual(path: Path) -> None:
    text = path.read_text().lower()
    assert "npufleet_device" not in text and "kernels.virtual" not in text and "is_virtual" not in text


@pytest.mark.parametrize("path", LIBRARY_PYTHON, ids=ident)
def test_only_ops_and_the_virtual_npu_call_torch_npu(path: Path) -> None:
    """A caller reads kernels/ops; torch_npu's operations are called nowhere else."""
    allowed = ("kernels/ops/", "kernels/reference/", "kernels/virtual/")
    if ident(path).startswith(allowed):
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            assert not re.match(r"torch_npu\._?npu_|torch\.ops\.(npu|atb)\b", text), (
                f"{ident(path)}:{node.lineno} calls {text}"
            )


@pytest.mark.parametrize("path", LIBRARY_PYTHON, ids=ident)
def test_environment_is_read_in_typed_modules_only(path: Path) -> None:
    homes = ("kernels/virtual/", "cluster/env.py", "plugin/platform.py", "plugin/overrides.py")
    if ident(path).startswith(homes):
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not re.fullmatch(r"NPUFLEET_[A-Z_]+", node.value), (
                f"{ident(path)}:{node.lineno} names {node.value}; read it in cluster/env.py"
            )


@pytest.mark.parametrize("path", LIBRARY_PYTHON, ids=ident)
def test_public_things_are_documented(path: Path) -> None:
    tree = tree_of(path)
    if path.name != "__init__.py" or tree.body:
        assert ast.get_docstring(tree), f"{ident(path)} has no module docstring"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name[0] == "_":
            continue
        assert ast.get_docstring(node), f"{ident(path)}:{node.lineno} {node.name} has no docstring"
