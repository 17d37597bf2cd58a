"""The demo's data set: the same windows on every call, and one clear line for what cannot be read."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elastic.demo.text import TextWindows, read_text
from reshard.errors import UsageError


@pytest.fixture
def alphabet(tmp_path: Path) -> Path:
    path = tmp_path / "alphabet.txt"
    path.write_bytes(b"abcdefghijklmnopqrstuvwxyz")
    return path


def test_text_windows_overlap_by_one_byte(alphabet: Path) -> None:
    windows = TextWindows(alphabet, sequence_length=5)

    assert len(windows) == 5
    assert [bytes(w["tokens"].astype(np.uint8)) for w in windows] == [
        b"abcdef",
        b"fghijk",
        b"klmnop",
        b"pqrstu",
        b"uvwxyz",
    ]


def test_text_rows_equal_items_in_any_order(alphabet: Path) -> None:
    windows = TextWindows(alphabet, sequence_length=5)

    tokens = windows.rows(np.array([4, 0, 0]))["tokens"]

    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, [windows[i]["tokens"] for i in (4, 0, 0)])


def test_text_rows_of_no_ids_is_empty(alphabet: Path) -> None:
    windows = TextWindows(alphabet, sequence_length=5)

    assert windows.rows(np.array([], dtype=np.int64))["tokens"].shape == (0, 6)


@pytest.mark.parametrize("ids", [[-1], [5], [0, 99]])
def test_text_rows_refuses_ids_out_of_range(alphabet: Path, ids: list[int]) -> None:
    with pytest.raises(IndexError, match=r"must be in \[0, 5\)"):
        TextWindows(alphabet, sequence_length=5).rows(np.array(ids))


def test_text_folder_is_its_files_in_path_order_without_hidden_ones(tmp_path: Path) -> None:
    for name, content in {"b.txt": b"2", "a/z.txt": b"1", ".git/x": b"no", "tests/t.py": b"3"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)

    assert read_text(tmp_path).tobytes() == b"123"


def test_text_stops_at_max_bytes(alphabet: Path) -> None:
    assert read_text(alphabet, max_bytes=3).tobytes() == b"abc"


def test_text_default_is_python_source_and_the_same_twice() -> None:
    first, second = read_text(max_bytes=300_000), read_text(max_bytes=300_000)

    np.testing.assert_array_equal(first, second)
    assert first.size == 300_000
    assert b"import " in first.tobytes()


def test_text_is_the_same_in_another_process() -> None:
    code = "from elastic.demo.text import read_text; import zlib; print(zlib.crc32(read_text()))"
    prints = [subprocess.check_output([sys.executable, "-c", code]) for _ in range(2)]

    assert prints[0] == prints[1]


def test_text_of_missing_path_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*nowhere: No such file or directory"):
        TextWindows(tmp_path / "nowhere")


def test_text_of_empty_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 bytes, one window needs 17"):
        TextWindows(tmp_path)


def test_text_shorter_than_a_window_is_a_usage_error(alphabet: Path) -> None:
    with pytest.raises(UsageError, match="26 bytes, one window needs 65"):
        TextWindows(alphabet, sequence_length=64)


def test_text_of_device_file_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="neither a regular file nor a folder"):
        TextWindows("/dev/zero")


def test_text_sequence_length_below_one_is_a_usage_error(alphabet: Path) -> None:
    with pytest.raises(UsageError, match="sequence_length must be at least 1"):
        TextWindows(alphabet, sequence_length=0)


def test_text_module_imports_without_jax() -> None:
    code = "import sys, elastic.demo, elastic.demo.text; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
