"""README and docs: links lead somewhere, the README is short, the version is one and the same everywhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("web/docs/**/*.md"), *ROOT.glob("tests/**/*.md")]
)
HELP = ROOT / "web" / "docs"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^(```.*?^```|(?: {4}|\t).*?$)", "", re.sub(r"`[^`\n]+`", "", text), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere; those to other sites are not followed."""
    found = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or link.startswith("/"):
            continue
        # ComfyUI serves the help pages of all nodes from one folder.
        base = HELP if page.is_relative_to(HELP) else page.parent
        target = (base / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert broken(page) == []


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](none.md) [b](#nowhere) [c](#a-heading) [d](https://example.org) `[e](f)`\n")
    assert broken(page) == ["none.md", "#nowhere"]


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1100 and len(text.splitlines()) <= 130


def test_the_version_is_one_and_the_same():
    """In one place, pyproject.toml; what has to repeat it agrees."""
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(\d.+?)\]", changes, re.MULTILINE)[1] == version
    assert f"\n[{version}]: https://" in changes
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    code = [
        p for folder in ("nodes", "toma_core", "web") for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".js")
    ]
    assert not [str(p) for p in code if f'"{version}"' in p.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name,size", [("Icon", (400, 400)), ("Banner", (1260, 540))])
def test_what_the_registry_shows(name, size):
    from PIL import Image

    address = re.search(rf'^{name} = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
    file = ROOT / address.partition("/main/")[2]
    assert Image.open(file).size == size and file.stat().st_size < 100_000
