# SPDX-License-Identifier: Apache-2.0
"""The site's parts without MkDocs: what is copied for it, and that a link that leads nowhere is found."""

import subprocess

import pytest
from conftest import ROOT
from devtool import setup, site


def test_documents_are_copied_with_what_they_link_to_so_that_their_links_hold(tmp_path):
    root, target = tmp_path / "root", tmp_path / "target"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text("[a](docs/a.md), ![b](docs/b.svg), [c](https://c.org/x.md), [d](#here)")
    (root / "docs/a.md").write_text("[back](../README.md#there)")
    (root / "docs/b.svg").write_text("<svg/>")
    (root / "docs/other.svg").write_text("<svg/>")
    subprocess.run(["git", "init", "-q", root], check=True)
    site.copy_documents(root, target)
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert copied == {"README.md", "docs/a.md", "docs/b.svg"}


def test_every_page_of_the_sites_menu_is_there_and_every_page_for_users_is_in_the_menu():
    lines = (ROOT / "docs/mkdocs.yml").read_text().splitlines()
    menu = {line.split(": ")[-1].strip("- ") for line in lines if line.endswith(".md")}
    assert [page for page in sorted(menu) if not (ROOT / page).exists()] == []
    users = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert users - menu == set()


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="sub/">s</a><a href="sub/index.html#there">t</a><a href="#top">u</a>'
        '<a href="https://elsewhere.org/none">v</a><a href="/sub/index.html">w</a>'
    )
    (tmp_path / "sub/index.html").write_text('<p id="there"><a href="../index.html">back</a>')
    assert site.follow_links(tmp_path) == (5, [])
    (tmp_path / "sub/index.html").write_text(
        '<a href="../none.html">a</a><a href="../index.html#nowhere">b</a><img src="none.png"><a href="#none">c</a>'
    )
    _, problems = site.follow_links(tmp_path)
    assert problems == [
        "index.html: sub/index.html#there",
        "sub/index.html: ../none.html",
        "sub/index.html: ../index.html#nowhere",
        "sub/index.html: none.png",
        "sub/index.html: #none",
    ]


@pytest.mark.long
def test_a_browser_sees_what_scripts_do_and_what_pages_ask_for(tmp_path):
    setup.system_packages("docs-system.txt")
    icon = "<link rel=icon href=data:,>"  # else a browser asks for one
    (tmp_path / "index.html").write_text(f"{icon}<h1 id=top>x</h1><a href=bad.html#made>a</a>")
    (tmp_path / "bad.html").write_text(
        f"{icon}<p id=gone>x</p><img src=none.png><script>document.body.innerHTML = '<h2 id=made>y</h2>"
        "<a href=index.html#none>z</a>'; nothing()</script>"
    )
    pages, problems = site.open_pages(tmp_path, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    said, heading, lost = problems
    assert "bad.html" in said and "nothing is not defined" in said
    assert heading == "bad.html: has no heading" and lost == "not there: /none.png: 404"
    _, broken = site.follow_links(tmp_path, pages)
    assert broken == ["bad.html: index.html#none"]
