"""The import rules: imports point down only, and none comes back to where it started."""

import ast
import subprocess
import sys
from collections.abc import Collection
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


def project_modules() -> dict[str, str]:
    """Dotted name -> source of every module of the three packages."""
    found = {}
    for package in ("jetspec", "kernels", "flows"):
        for path in modules(package):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imported_modules(source: str, known: Collection[str]) -> set[str]:
    """Modules of `known` that a module imports anywhere in it, for more than types: named by a
    statement, or in full by a string, as `importlib` is given them. With a module come the
    packages above it, whose own code runs first."""
    named: set[str] = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "the project writes imports out in full"
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            named |= {node.value} & set(known)
    above = {name.rsplit(".", depth)[0] for name in named for depth in range(name.count(".") + 1)}
    return above & set(known)


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Groups of modules that import each other, by however many steps."""
    reach = {}
    for name, source in sources.items():
        own_packages = {name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)}
        reach[name] = imported_modules(source, sources) - own_packages
    while True:
        further = {name: seen.union(*(reach[n] for n in seen)) for name, seen in reach.items()}
        if further == reach:
            break
        reach = further
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in reach
        if name in reach[name]
    }
    return sorted(map(list, groups))


def test_no_module_imports_one_that_imports_it_back() -> None:
    assert circles(project_modules()) == []


@pytest.mark.parametrize(
    "back",
    [
        "import a.one",
        "from a.one import thing",
        "from a import one",
        "def f():\n    if f:\n        from a.one import thing",
        "class C:\n    def f(self):\n        import a.one as b",
        "import importlib\nNAMES = {'one': 'a.one'}",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import a.one",
    ],
)
def test_the_rule_sees_a_circle_however_it_is_closed(back: str) -> None:
    sources = {"a": "", "a.one": "import b.two", "b": "", "b.two": "from c import x", "c": back}
    assert circles(sources) == [["a.one", "b.two", "c"]]
    package = {"a": "", "a.one": "import b.two", "b": back, "b.two": ""}
    assert circles(package) == [["a.one", "b"]], "a package's code runs before its modules'"


def test_the_rule_allows_types_and_a_package_that_gathers_its_own_modules() -> None:
    types = "import typing\nif typing.TYPE_CHECKING:\n    from a.one import Thing\n'see a.one'"
    assert circles({"a": "", "a.one": "import b", "b": types}) == []
    assert circles({"a": "from a.one import x", "a.one": "import a.two", "a.two": ""}) == []


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
