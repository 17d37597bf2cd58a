import ast
import subprocess
import sys
from pathlib import Path

import pytest

import reshard

MODULES = sorted(Path(reshard.__file__).parent.glob("*.py"))
IMPURE = {"time", "random", "threading", "os", "jax", "asyncio", "socket", "datetime"}
ALLOWED = {"numpy", "msgspec", "reshard"} | (sys.stdlib_module_names - IMPURE)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_reshard_module_imports_nothing_impure(module):
    names = set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names <= ALLOWED


def test_reshard_import_does_not_load_jax():
    code = "import sys, reshard, reshard.execute; sys.exit('jax' in sys.modules)"
    root = Path(reshard.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60).returncode == 0


def test_reshard_public_names_exist_and_are_few():
    assert len(reshard.__all__) <= 15
    assert all(hasattr(reshard, name) for name in reshard.__all__)
