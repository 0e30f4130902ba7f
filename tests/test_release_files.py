"""Files that people and programs look for in a release agree with each other."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import rowhaul

ROOT = Path(__file__).parent.parent


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0].lower()


def pinned(file):
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    return {name_of(line): line for line in lines if line}


def test_the_version_is_in_one_place():
    assert "version" in project()["dynamic"]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f"## {rowhaul.__version__.partition('.dev')[0]}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("file", ["release/lowest.txt", "release/newest.txt"])
def test_every_dependency_is_pinned(file):
    assert {name_of(one) for one in project()["dependencies"]} <= set(pinned(file))


def test_the_lowest_versions_are_the_bounds():
    lowest = (ROOT / "release/lowest.txt").read_text().lower()
    for requirement in project()["dependencies"]:
        name, bound = requirement.lower().partition(",")[0].split(">=")
        # PyYAML 6 and xxhash 3.4.0 have no wheel that can be installed; their first fix does.
        assert re.search(rf"^{name}=={re.escape(bound)}(\.\d+)*\b", lowest, re.MULTILINE), requirement


def test_the_citation_names_the_four_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert [len(one["authors"]) for one in cited["references"]] == [8, 7, 11, 4]
    assert all(one["title"] for one in cited["references"])


def test_issue_forms_ask_for_something():
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids))


def test_the_site_shows_every_page():
    class Loader(yaml.SafeLoader):
        """Knows MkDocs' tags as far as needed: not at all."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)

    def pages(nav):
        if isinstance(nav, str):
            return {nav}
        parts = nav.values() if isinstance(nav, dict) else nav
        return set().union(*map(pages, parts))

    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    generated = {"reference/commands.md", "reference/python.md"}
    assert pages(site["nav"]) == written | generated
