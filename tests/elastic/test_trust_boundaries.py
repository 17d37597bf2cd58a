"""What a job leaves readable, and that nothing that was received is ever executed."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import chaos
import controller_adapter
import elastic
import reshard
import snapshot
from elastic.job import JOB_FILE, TOKEN_FILE, JobSpec, load_token, save_job
from elastic.state import Config
from reshard.errors import UsageError
from reshard.ids import HostId
from snapshot.arena import Arena
from snapshot.shm import make_directory

PACKAGES = (reshard, snapshot, elastic, controller_adapter, chaos)
EXECUTING_MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "jsonpickle",
    "yaml",
    "multiprocessing",
    "code",
}
EXECUTING_CALLS = {"eval", "exec", "compile", "__import__"}
EXECUTING_METHODS = {"read_pickle", "loads_pickle", "import_string"}


def modules() -> list[Path]:
    return [path for package in PACKAGES for root in package.__path__ for path in Path(root).rglob("*.py")]


def called_names(tree: ast.AST) -> set[str]:
    """The bare names that are called: `eval(…)`, and not `anything.eval(…)`."""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def imported_modules(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_all_modules_are_looked_at() -> None:
    assert len(modules()) > 150
    assert {path.name for path in modules()} >= {
        "wire.py",
        "dataplane_wire.py",
        "coordinator.py",
        "errors.py",
    }


@pytest.mark.parametrize("path", modules(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_module_executes_nothing_that_is_data(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not imported_modules(tree) & EXECUTING_MODULES
    assert not called_names(tree) & EXECUTING_CALLS
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not attributes & EXECUTING_METHODS
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        allows = [keyword for keyword in call.keywords if keyword.arg == "allow_pickle"]
        assert all(isinstance(one.value, ast.Constant) and one.value.value is False for one in allows)


def test_no_message_names_a_class_to_make_beyond_the_listed_ones() -> None:
    """`Codec` looks names up in its own table: no import, no getattr by what was received."""
    wire = ast.parse((Path(elastic.__path__[0]) / "wire.py").read_text())
    assert not called_names(wire) & {"getattr", "globals", "locals", "vars", "import_module"}


# ---- modes -------------------------------------------------------------------------------------------------


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return JobSpec(
        job_id="test", directory=tmp_path / "run", adapter="multicontroller", in_place="proven",
        simulated_faults=False, command=("true",), service_command=(), config=Config(num_slices=2),
        shm_root=tmp_path,
    )  # fmt: skip


def mode(path: Path) -> int:
    return path.stat(follow_symlinks=False).st_mode & 0o7777


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_token_and_memory_are_their_owners_alone_whatever_the_umask(spec: JobSpec, umask: int) -> None:
    previous = os.umask(umask)
    try:
        token = save_job(spec)
        arena = Arena.create(spec.job_id, HostId(0), root=spec.shm_root)
        arena.reserve(1 << 16)
    finally:
        os.umask(previous)
    assert mode(spec.directory / TOKEN_FILE) == 0o600
    assert token not in (spec.directory / JOB_FILE).read_text()
    job_memory = spec.shm_root / f"elastic-{spec.job_id}"
    directories = [job_memory, *(path for path in job_memory.rglob("*") if path.is_dir())]
    files = [path for path in job_memory.rglob("*") if path.is_file()]
    assert arena.directory in directories
    assert len(files) >= 3
    assert {mode(path) for path in directories} == {0o700}
    assert {mode(path) for path in files} == {0o600}
    arena.unlink()


def test_new_token_is_not_seen_through_an_old_file_that_all_may_read(spec: JobSpec) -> None:
    spec.directory.mkdir()
    old = spec.directory / TOKEN_FILE
    old.write_text("old")
    old.chmod(0o644)
    with old.open() as reader:
        token = save_job(spec)
        assert reader.read() == "old"
    assert (mode(old), load_token(spec.directory)) == (0o600, token)


@pytest.mark.parametrize("readable", [0o640, 0o604, 0o620, 0o666])
def test_token_that_others_can_read_or_change_is_not_used(spec: JobSpec, readable: int) -> None:
    save_job(spec)
    (spec.directory / TOKEN_FILE).chmod(readable)
    with pytest.raises(UsageError, match=f"has mode 0{readable:o}"):
        load_token(spec.directory)


def test_directory_for_memory_that_others_could_enter_is_closed(tmp_path: Path) -> None:
    found = tmp_path / "elastic-test"
    found.mkdir()
    found.chmod(0o755)
    make_directory(found)
    assert mode(found) == 0o700


def test_directory_for_memory_of_another_user_or_behind_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "elastic-test"
    found.mkdir()
    (tmp_path / "link").symlink_to(found)
    with pytest.raises(UsageError, match="not a directory"):
        make_directory(tmp_path / "link")
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: found.stat().st_uid + 1)
        with pytest.raises(UsageError, match="of another user"):
            make_directory(found)
