"""A link in the documents leads somewhere: to a file of this project, and to a heading where it names one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def links(text: str) -> list[str]:
    """The relative links of a page; what stands in code is none."""
    found = _LINK.findall(_FENCED.sub("", text))
    return [target for target in found if not re.match(r"[a-z][a-z+.-]*:", target)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        num_before = sum(
            known == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", known) is not None for known in found
        )
        found.add(f"{slug}-{num_before}" if num_before else slug)
    return found


def is_broken(page: Path, target: str) -> bool:
    """Whether a link of `page` leads to no file below the root, or to no heading of it."""
    name, _, anchor = target.partition("#")
    to = (page.parent / name).resolve() if name else page
    if not to.is_relative_to(ROOT) or not to.exists():
        return True
    return bool(anchor) and anchor not in anchors(to.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_of_a_page_lead_to_files_and_headings_that_exist(page: Path) -> None:
    assert [target for target in links(page.read_text()) if is_broken(page, target)] == []


def test_links_are_found_outside_of_code_only() -> None:
    text = 'See [a](b.md#c "t"), [d](https://e.org) and ![f](<g.png>).\n```\n[h](i.md)\n```\n`[j](k.md)`'
    assert links(text) == ["b.md#c", "g.png"]


def test_anchors_are_those_of_headings_and_count_what_is_named_twice() -> None:
    text = "# A, b: `c_d` – e\n## Twice\n```\n# no heading\n```\n## Twice\n### [Linked](x.md) ##\n"
    assert anchors(text) == {"a-b-c_d--e", "twice", "twice-1", "linked"}


@pytest.mark.parametrize("target", ["nowhere.md", "LICENSE#no-heading", "../outside.md", "#no-heading"])
def test_broken_links_are_told(target: str) -> None:
    assert is_broken(ROOT / "README.md", target)
