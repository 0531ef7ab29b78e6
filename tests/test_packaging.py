"""Guards of the packaging and of the rules that hold for every source file.

What is checked here is cheap to break and hard to notice: a top-level ``kernels`` that breaks
``import transformers``, an import from a lower layer of a higher one, a private torch module
used outside the one file that is allowed to.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
# Installed package -> folder in the repository.
PACKAGES = {
    "fpdt_compile": "fpdt_compile",
    "fpdt_compile.cost": "fpdt_compile/cost",
    "fpdt_compile.runtime": "fpdt_compile/runtime",
    "fpdt_compile.passes": "passes",
    "fpdt_compile.kernels": "kernels",
}
LIBRARY = {
    f"{package}.{path.stem}": path
    for package, folder in PACKAGES.items()
    for path in sorted((ROOT / folder).glob("*.py"))
}
REPOSITORY = [
    path
    for folder in (
        "fpdt_compile",
        "passes",
        "kernels",
        "tests",
        "benchmarks",
        "examples",
    )
    for path in sorted((ROOT / folder).rglob("*.py"))
]

# Lower layers first; a module may import from its own layer and from those before it.
LAYERS = (
    ("_torch_sizes",),
    ("_torch_private", "errors", "autocast", "config", "graph", "plan"),
    ("debug", "cost"),
    ("kernels", "runtime"),
    ("kernels (Triton)",),
    ("passes",),
    (
        "token_dims",
        "groups",
        "sharding",
        "recorded_outputs",
        "flex_attention",
        "retrace",
        "capture",
        "backend",
        "explain",
    ),
    ("api",),
    ("chunked_loss", "timeline"),
    ("__init__", "testing"),
)
PRIVATE_TORCH = ("_inductor", "_dynamo", "_functorch", "_C", "_guards", "_subclasses")
MAY_USE_PRIVATE_TORCH = (
    "fpdt_compile._torch_sizes",
    "fpdt_compile._torch_private",
    "fpdt_compile.kernels.lowering",
)
MAX_LINES = 420


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a module of ``package`` imports.

    ``from x import y`` yields ``x.y``: y may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def imports_triton(path: Path) -> bool:
    return any(
        target.split(".")[0] == "triton" for _, target in imports_of(tree_of(path), "")
    )


def layer_of(target: str) -> int | None:
    """The layer of a dotted name inside the library; None for ``fpdt_compile.x``, x unknown."""
    parts = target.split(".")
    word = parts[1] if len(parts) > 1 else "__init__"
    if word == "kernels" and len(parts) > 2:
        path = ROOT / "kernels" / f"{parts[2]}.py"
        if path.exists() and imports_triton(path):
            word = "kernels (Triton)"
    return next((i for i, words in enumerate(LAYERS) if word in words), None)


def run_python(code: str, cwd: Path) -> str:
    """Output of ``code`` in a fresh interpreter that has only what is installed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- packaging ---------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["passes", "kernels"])
def test_init_holds_a_docstring_and_nothing_else(folder: str) -> None:
    tree = tree_of(ROOT / folder / "__init__.py")
    assert len(tree.body) == 1
    assert ast.get_docstring(tree)


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_package_has_an_init(package: str) -> None:
    assert (ROOT / PACKAGES[package] / "__init__.py").is_file()


def test_every_folder_with_modules_is_packaged() -> None:
    packaged = {ROOT / folder for folder in PACKAGES.values()}
    for folder in ("fpdt_compile", "passes", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.parent in packaged, f"{name_of(path)} would not be installed"


def test_tests_are_flat_and_no_package() -> None:
    tests = ROOT / "tests"
    assert not (tests / "__init__.py").exists()
    assert not (ROOT / "conftest.py").exists()
    assert not [path for path in tests.rglob("*.py") if path.parent != tests]


def test_root_is_not_on_the_path_of_the_tests() -> None:
    assert ROOT not in [Path(entry or ".").resolve() for entry in sys.path]


def test_installed_package_leaves_no_top_level_kernels_or_passes(
    tmp_path: Path,
) -> None:
    # Another project's `kernels` may be installed: only ours must not be found.
    code = (
        "import importlib.util as u\n"
        "import fpdt_compile.kernels, fpdt_compile.passes\n"
        "specs = [u.find_spec(n) for n in ('kernels', 'passes')]\n"
        "print([s.origin for s in specs if s is not None])"
    )
    assert str(ROOT) not in run_python(code, tmp_path)


def test_transformers_imports_with_the_root_on_the_path() -> None:
    pytest.importorskip("transformers")
    code = "from transformers import LlamaForCausalLM as m; print(m.__name__)"
    assert run_python(code, ROOT) == "LlamaForCausalLM"


def test_import_is_light(tmp_path: Path) -> None:
    # torch._dynamo imports triton where it is installed; we add nothing to that.
    code = (
        "import sys, torch._dynamo\n"
        "before = set(sys.modules)\n"
        "import fpdt_compile\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new & {'triton', 'transformers'}), torch.cuda.is_initialized())"
    )
    assert run_python(code, tmp_path) == "[] False"


def test_import_needs_no_triton(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import fpdt_compile\n"
        "print(fpdt_compile.__version__)"
    )
    assert run_python(code, tmp_path)


def test_import_starts_no_process_group_and_no_thread(tmp_path: Path) -> None:
    code = (
        "import threading, torch\n"
        "before = threading.active_count()\n"
        "import fpdt_compile\n"
        "print(threading.active_count() - before, torch.distributed.is_initialized())"
    )
    assert run_python(code, tmp_path) == "0 False"


def test_backend_is_registered() -> None:
    assert "fpdt" in torch._dynamo.list_backends()


# --- rules for every source file ---------------------------------------------------------


def test_imports_go_one_way() -> None:
    wrong = []
    for module, path in LIBRARY.items():
        package, _, stem = module.rpartition(".")
        own = layer_of(package if stem == "__init__" else module)
        if own is None:
            wrong.append(f"{name_of(path)} has no place in LAYERS")
            continue
        for line, target in imports_of(tree_of(path), package):
            if target.split(".")[0] in ("passes", "kernels"):
                wrong.append(f"{name_of(path)}:{line} imports {target} as top-level")
            if target.split(".")[0] != "fpdt_compile":
                continue
            theirs = layer_of(target)
            # `from fpdt_compile import x`, x no module: what the package itself offers.
            theirs = layer_of("fpdt_compile") if theirs is None else theirs
            if theirs > own:
                wrong.append(f"{name_of(path)}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def private_torch_uses(tree: ast.Module, package: str) -> Iterator[tuple[int, str]]:
    for line, target in imports_of(tree, package):
        parts = target.split(".")
        if parts[0] == "torch" and len(parts) > 1 and parts[1] in PRIVATE_TORCH:
            yield line, target
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in PRIVATE_TORCH
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield node.lineno, f"torch.{node.attr}"


def test_private_torch_is_used_in_one_place() -> None:
    wrong = [
        f"{name_of(path)}:{line} uses {target}"
        for module, path in LIBRARY.items()
        if module not in MAY_USE_PRIVATE_TORCH
        for line, target in private_torch_uses(tree_of(path), module.rpartition(".")[0])
    ]
    assert not wrong, "\n".join(wrong)


def caught_names(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"everything"}
    return {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}


def forbidden(node: ast.AST) -> str | None:
    """What library code never does, or None."""
    if isinstance(node, ast.Global):
        return "global"
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ):
        return "print()"
    if isinstance(node, ast.ExceptHandler):
        # Cleaning up after anything is fine where the error goes on.
        last = node.body[-1]
        passes_on = isinstance(last, ast.Raise) and last.exc is None
        caught = caught_names(node)
        if caught & {"everything", "Exception"}:
            return "except for everything"
        if "BaseException" in caught and not passes_on:
            return "except BaseException without raise"
    return None


def test_no_print_global_or_catch_all() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {what}"
        for path in LIBRARY.values()
        for node in ast.walk(tree_of(path))
        if (what := forbidden(node)) is not None
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", REPOSITORY, ids=name_of)
def test_file_is_documented_and_of_readable_length(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), (
        "a module docstring says what the file does"
    )
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
