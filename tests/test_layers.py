"""The one import rule: imports point down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kernels

ROOT = Path(__file__).resolve().parent.parent
ORCHESTRATION = {"prefect", "ray", "mlflow", "vllm"}
FORBIDDEN = {
    "jetspec": ORCHESTRATION | {"flows"},
    "kernels": ORCHESTRATION | {"flows", "jetspec", "transformers"},
}


def imported_roots(source: str, *, everywhere: bool) -> set[str]:
    """Top-level packages a module imports, at module level or anywhere in it."""
    tree = ast.parse(source)
    nodes = ast.walk(tree) if everywhere else _module_level(tree)
    roots: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots.add((node.module or "").split(".")[0])
    return roots


def _module_level(tree: ast.Module) -> list[ast.AST]:
    found: list[ast.AST] = []
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        found.append(node)
        pending.extend(ast.iter_child_nodes(node))
    return found


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_library_modules_import_no_orchestrator_and_nothing_above_them(package: str) -> None:
    offenders = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in modules(package)
        if (bad := imported_roots(path.read_text(), everywhere=False) & FORBIDDEN[package])
    }
    assert offenders == {}


@pytest.mark.parametrize("package", ["jetspec", "kernels"])
def test_upward_imports_are_not_hidden_inside_functions(package: str) -> None:
    upward = FORBIDDEN[package] - {"vllm"}
    offenders = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in modules(package)
        if (bad := imported_roots(path.read_text(), everywhere=True) & upward)
    }
    assert offenders == {}


def test_the_rule_sees_a_forbidden_import_at_module_level_and_in_a_function() -> None:
    source = "def f():\n    import ray\n\nif True:\n    from prefect import flow\n"
    assert imported_roots(source, everywhere=False) == {"prefect"}
    assert imported_roots(source, everywhere=True) == {"prefect", "ray"}


def test_library_commands_start_without_any_orchestrator() -> None:
    """A GPU box has no ray, prefect or mlflow: block them and ask for the help text."""
    program = (
        "import sys\n"
        f"for name in {sorted(ORCHESTRATION)}: sys.modules[name] = None\n"
        "from jetspec.cli import app\n"
        "import jetspec.config, jetspec.decode, jetspec.training.loop, jetspec.evaluation.matrix\n"
        "import jetspec.generation.regenerate, jetspec.heads.formats, jetspec.promotion\n"
        "app(['--help'], standalone_mode=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train" in done.stdout


def test_kernels_is_this_projects_package() -> None:
    assert Path(kernels.__file__).resolve() == ROOT / "kernels" / "__init__.py"
