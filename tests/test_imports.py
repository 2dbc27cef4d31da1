"""Imports run one way (coolsd <- data <- training, and layers inside coolsd), and `import coolsd` is cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Every unit of coolsd -> the units it may import, itself always included.  A unit is a module, or a folder of modules.
WORDS = {"tree", "interfaces", "sampling", "checkpoint"}  # a tree is integers
BLOCKS = WORDS | {"kv_cache", "transformer"}
PARTS = BLOCKS | {"rules", "heads", "targets", "image_tokenizers", "drafters", "verify", "decode"}
MAY_IMPORT = {
    **dict.fromkeys(("tree", "interfaces", "sampling", "checkpoint"), WORDS),
    **dict.fromkeys(("kv_cache", "transformer"), BLOCKS),
    **dict.fromkeys(("rules", "heads", "image_tokenizers"), BLOCKS),  # never each other
    "targets": BLOCKS | {"image_tokenizers"},  # a target's folder may hold its tokenizer
    "drafters": BLOCKS | {"heads"},
    "verify": BLOCKS,
    "decode": BLOCKS | {"verify"},  # no rule, head, target or drafter by name
    "cli": set(),  # commands are imported on demand, by name
}


def imports(path):
    """(line, module) of every import of ours in a file, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] in ("coolsd", "data", "training", "tests"):
                yield node.lineno, name


def files(package):
    return sorted((ROOT / package).rglob("*.py"))


def test_packages_import_one_way():
    allowed = {"coolsd": {"coolsd"}, "data": {"coolsd", "data"}, "training": {"coolsd", "data", "training"}}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for package, known in allowed.items()
        for path in files(package)
        for line, name in imports(path)
        if name.split(".")[0] not in known
    ]
    assert not wrong


def test_layers_of_coolsd_import_one_way():
    wrong = []
    for path in files("coolsd"):
        unit = path.relative_to(ROOT / "coolsd").parts[0].removesuffix(".py")
        known = MAY_IMPORT.get(unit)
        for line, name in imports(path):
            parts = name.split(".")
            imported = parts[1] if len(parts) > 1 else ""
            ours = (ROOT / "coolsd" / imported).exists() or (ROOT / "coolsd" / f"{imported}.py").exists()
            if known is not None and ours and imported and imported != unit and imported not in known:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    wrong = [line for line in wrong if not line.startswith("coolsd/__init__.py")]
    assert not wrong


def test_a_wrong_import_is_seen(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from data.features import FeatureCache\nimport training.cli\nfrom os import path\n")
    assert sorted(imports(path)) == [(2, "data.features.FeatureCache"), (3, "training.cli")]


@pytest.mark.parametrize("code", ["import coolsd", "import coolsd.cli; coolsd.cli.main(['--help'])"])
def test_importing_coolsd_imports_no_library(code):
    check = (
        f"{code}\nimport sys; print([m for m in ('torch', 'lightning', 'numpy', 'jsonargparse') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_public_names_exist():
    import coolsd

    for name in coolsd.__all__:
        assert getattr(coolsd, name) is not None
    with pytest.raises(AttributeError, match="its names are"):
        coolsd.nonsense  # noqa: B018


def test_every_command_has_its_function():
    import importlib.util

    from coolsd.cli import COMMANDS

    for where, _ in COMMANDS.values():
        module, function = where.split(":")
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin, module
        names = {
            node.name for node in ast.parse(Path(found.origin).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert function in names
