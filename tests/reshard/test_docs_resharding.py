"""The example of docs/resharding.md runs and prints what the page says."""

import re
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "resharding.md").read_text()


def test_docs_example_prints_what_the_page_says(capsys):
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/resharding.md", "exec"), {})
    assert capsys.readouterr().out == printed
