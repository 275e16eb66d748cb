"""The pages as a site: built strictly and offline, every link and anchor leads somewhere, pages look as on GitHub."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from pymdownx.slugs import slugify

from support.browser import running_browser
from support.pages import parsed, rendered
from support.repository import ROOT, tracked_files

PAGES = [n for n in tracked_files() if re.fullmatch(r"docs/[\w-]+\.md", n)]
MARKDOWN = [n for n in tracked_files() if n.endswith(".md")]
COUNTED = ("table", "tr", "li", "ul", "ol", "h2", "h3", "pre", "img")


class Elements(HTMLParser):
    """Tags of a page with their attributes, ids and text of links."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def article(self) -> Elements:
        """What a page says, without what stands around it."""
        return Elements(self.html.partition("<article")[2].partition("</article>")[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    @property
    def ids(self) -> set[str]:
        return {str(a[key]) for _, a in self.found for key in ("id", "name") if a.get(key)}

    def counts(self) -> dict[str, int]:
        return {tag: sum(t == tag for t, _ in self.found) for tag in COUNTED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("site") / "site"


@pytest.fixture(scope="module")
def site(folder: Path) -> dict[str, Elements]:
    """Every page of the site, built into `folder`, by its path."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert (folder / "search" / "search_index.json").stat().st_size > 100_000
    return {p.relative_to(folder).as_posix(): Elements(p.read_text("utf-8")) for p in folder.rglob("*.html")}


def test_every_page_is_there_and_has_its_place(site: dict[str, Elements]) -> None:
    nav = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2], re.MULTILINE)
    assert sorted(nav) == sorted(n.removeprefix("docs/") for n in PAGES), "enter the page in the nav of mkdocs.yml"
    assert {n.replace(".md", ".html") for n in nav} <= set(site)


def test_nothing_is_loaded_from_elsewhere(site: dict[str, Elements]) -> None:
    for page, html in site.items():
        for tag, attributes in html.found:
            loaded = attributes.get("src") if tag != "link" else attributes.get("href")
            if tag == "link" and attributes.get("rel") in ("canonical", "prev", "next"):
                continue
            assert not re.match(r"(https?:)?//", loaded or ""), f"{page}: <{tag}> loads {loaded}"


def test_every_link_and_anchor_leads_somewhere(site: dict[str, Elements]) -> None:
    n = 0
    for page, html in site.items():
        for tag, attributes in html.found:
            target = attributes.get("href") or ""
            if tag != "a" or not target or re.match(r"\w+:|/", target):
                continue
            path, _, anchor = target.partition("#")
            there = os.path.normpath(Path(page).parent / path) if path else page
            if Path(there).suffix == ".html":
                assert there in site, f"{page}: {target}"
                assert not anchor or anchor == "__skip" or anchor in site[there].ids, f"{page}: {target}"
                n += 1
    assert n > 2000


@pytest.mark.parametrize("name", PAGES)
def test_a_page_looks_as_it_does_on_github(name: str, site: dict[str, Elements]) -> None:
    """Two readings of Markdown, CommonMark and the site's, find the same tables, lists, headings and code blocks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert site[f"{Path(name).stem}.html"].article().counts() == Elements(rendered(text)).counts()


@cache
def anchors(name: str) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    slug = slugify(case="lower")
    tokens = parsed((ROOT / name).read_text(encoding="utf-8"))
    titles = [tokens[i + 1].children or [] for i, t in enumerate(tokens) if t.type == "heading_open"]
    return frozenset(slug("".join(c.content for c in title), "-") for title in titles)


@pytest.mark.parametrize("name", MARKDOWN)
def test_anchors_between_pages_are_there(name: str) -> None:
    for target, anchor in re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        path = (Path(name).parent / target) if target else Path(name)
        page = os.path.normpath(path)
        if page.endswith(".md"):
            assert anchor in anchors(page), f"{name}: {target}#{anchor}"


def test_the_configuration_is_offline() -> None:
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config = yaml.safe_load(text)
    assert config["theme"]["font"] is False
    assert not {"extra_javascript", "site_url", "repo_url"} & set(config)
    assert all((ROOT / "docs" / name).is_file() for name in config["extra_css"])


def test_outputs_stand_in_columns() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    shown = "$ kvtape sql L\na\tlong name\tb\n1\t2\t3\nchain digest 0"
    assert hooks["aligned"](shown) == "$ kvtape sql L\na  long name  b\n1  2          3\nchain digest 0"


def test_a_reader_finds_a_page_from_the_disk(site: dict[str, Elements], folder: Path) -> None:
    """In the system's browser, offline: the search answers, nothing goes wrong, and nothing leaves the disk."""
    with running_browser() as browser, browser.new_context(offline=True) as context:
        page = context.new_page()
        wrong: list[str] = []
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith("file:") else None)
        page.goto((folder / "index.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("prefilled again")
        page.wait_for_selector(".md-search-result__item a")
        found = [link.get_attribute("href") or "" for link in page.query_selector_all(".md-search-result__item a")]
        assert any("faq.html" in link for link in found[:6]), found
        page.goto((folder / "contributing.html").as_uri())
        # What the button gives away is the text of a block while it is marked so.
        taken = page.locator("code:has(.gp)").first.evaluate("e => (e.toggleAttribute('data-md-copying'), e.innerText)")
        assert taken.strip() == "python -m pytest -q test_thinning.py"
        assert wrong == []
