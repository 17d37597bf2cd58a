"""Where a thread is: in the script, or waiting in the runtime."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elastic.worker_stacks import Place, locate, report_stacks, take_stacks


def stack(*modules: str) -> list[Place]:
    return [Place(module=name, function=f"f{i}", file="/x/y.py", line=i) for i, name in enumerate(modules)]


@pytest.mark.parametrize(
    ("modules", "in_script"),
    [
        (("jax._src.array", "elastic.world", "__main__"), False),
        (("threading", "elastic.agent_link", "elastic.world", "__main__"), False),
        (("__main__", "jax._src.pjit", "__main__"), True),
        (("threading", "queue", "my_data", "elastic.feed"), True),
        (("torch.utils", "__main__"), True),
        (("elastic.demo.text", "elastic.feed"), True),
        (("jaxtyping",), True),
        ((), False),
    ],
)
def test_innermost_frame_beyond_pythons_own_library_decides(
    modules: tuple[str, ...], in_script: bool
) -> None:
    assert locate(stack(*modules))[0] is in_script


def test_place_is_told_with_function_file_and_line() -> None:
    assert locate(stack("threading", "my_data"))[1] == "f1 (y.py:1)"


def test_stacks_of_another_thread_name_the_function_it_hangs_in(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hang_here() -> None:
        inside.set()
        go_on.wait()

    thread = threading.Thread(target=hang_here)
    thread.start()
    inside.wait()
    path = tmp_path / "logs" / "worker-0.stacks"
    path.parent.mkdir()
    path.write_text("of an earlier hang" * 1000)
    try:
        in_script, where = take_stacks(path, thread.ident or 0)
    finally:
        go_on.set()
        thread.join()
    assert in_script
    assert "hang_here (test_worker_stacks.py:" in where
    text = path.read_text()
    assert "earlier hang" not in text
    assert " in hang_here" in text


def test_stacks_that_cannot_be_written_are_told_without(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the directory should be")
    told = report_stacks(tmp_path / "logs" / "worker-1.stacks", 1, 3)
    assert (told.member, told.generation, told.in_script) == (1, 3, False)
    assert "worker_stacks.py" in told.where
    assert "could not be written" in told.where
