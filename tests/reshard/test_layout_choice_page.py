"""The page on the layout choice shows what its example prints."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "layout-choice.md"


def test_layout_choice_page_shows_what_its_example_prints(capsys):
    (found,) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    code, shown = found
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == shown
