# SPDX-License-Identifier: Apache-2.0
"""tools/dev docs: the documents as a site, each page of which is opened in a browser and every link followed."""

from __future__ import annotations

import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from devtool import checks, setup
from devtool.browser import Browser
from devtool.setup import ROOT, SetupError, run

BUILD = ROOT / "build/docs"
TOOLS = BUILD / "tools"


def main(arguments: list[str]) -> int:
    """Makes build/docs/site/index.html, and says which of its links lead nowhere and what a browser misses."""
    if arguments:
        raise SetupError(f"tools/dev docs takes no {arguments[0]!r}")
    setup.system_packages("docs-system.txt")
    python = setup.python_environment()
    setup.install_beside(python, TOOLS, "MkDocs Material, for the site", "docs.txt")
    copy_documents(ROOT, BUILD / "source")
    environment = os.environ | {"PYTHONPATH": str(TOOLS), "NO_MKDOCS_2_WARNING": "1"}
    config = ROOT / "docs/mkdocs.yml"
    command = [python, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", config]
    run("Site", command, env=environment, log_name="docs")
    site = BUILD / "site"
    pages, problems = open_pages(site, BUILD / "first-page.png")
    links, lost = follow_links(site, pages)
    problems += lost
    for problem in problems:
        print(problem)
    print(
        f"{(site / 'index.html').relative_to(ROOT)}: {len(pages)} pages opened in Chromium, {links} links followed, "
        f"{len(problems)} problems; the first page: {(BUILD / 'first-page.png').relative_to(ROOT)}"
    )
    return 1 if problems else 0


def open_pages(site: Path, picture: Path) -> tuple[dict[Path, str], list[str]]:
    """Each page as a browser has it after its scripts have run, and what was amiss."""
    names = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html"))]
    with Browser(site) as browser:
        opened = browser.all_opened(names)
        browser.pictured("index.html", picture)
    problems = [f"{name}: {error}" for name, (_, errors) in opened.items() for error in errors]
    problems += [f"{name}: has no heading" for name, (document, _) in opened.items() if "<h1" not in document]
    problems += [f"not there: {lost}" for lost in sorted(browser.lost)]
    return {(site / name).resolve(): document for name, (document, _) in opened.items()}, problems


def copy_documents(root: Path, target: Path) -> None:
    """Every .md at its place, and the files that they link to: so their links hold as they are."""
    shutil.rmtree(target, ignore_errors=True)
    documents = [path for path in checks.tracked(root) if path.suffix == ".md"]
    wanted = set(documents)
    for document in documents:
        for link in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
            if (linked := document.parent / link).is_file():
                wanted.add(linked.resolve())
    for path in wanted:
        copied = target / path.relative_to(root)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copied)


class _Page(HTMLParser):
    def __init__(self, document: str):
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(document)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        given = dict(attributes)
        self.names |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [given[name] for name in ("href", "src") if given.get(name)]


def follow_links(site: Path, documents: dict[Path, str] | None = None) -> tuple[int, list[str]]:
    """How many links the pages have, and those that lead to no file or no place in it. Other sites are not asked.

    `documents`: the pages as a browser has them; None: as they are on disk.
    """
    files = sorted(path.resolve() for path in site.rglob("*.html"))
    pages = {path: _Page(path.read_text() if documents is None else documents[path]) for path in files}
    count, problems = 0, []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            folder = site if parts.path.startswith("/") else path.parent
            target = (folder / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            place = unquote(parts.fragment)
            lost = not target.exists() or (place and target in pages and place not in pages[target].names)
            if lost and path.name != "404.html":
                problems.append(f"{path.relative_to(site.resolve())}: {link}")
    return count, problems
