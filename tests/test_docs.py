"""Every Python and shell snippet of the documentation runs as it stands."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rowhaul.cli import main
from rowhaul.train import TrainConfig

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n<!-- (\w+): (\S+) -->)?", re.MULTILINE | re.DOTALL)

# Pages whose snippets run in one folder, in this order: a later page uses what an earlier one made.
CHAINS = [
    ["README.md"],
    ["docs/tutorial.md"],
    ["docs/optimizers.md"],
    ["docs/pruning.md"],
    ["docs/memory-budget.md"],
    ["docs/row-precision.md"],
    ["docs/your-parquet.md", "docs/checkpoints.md"],
    ["docs/serving.md", "docs/row-file.md"],
    ["docs/models.md"],
    ["docs/data.md"],
    ["docs/generator.md"],
    ["docs/scheduling.md"],
    ["docs/tables-that-grow.md"],
    ["docs/online.md"],
    ["docs/deltas.md"],
    ["docs/simulate.md"],
    ["docs/what-moves-and-why.md"],
    ["docs/hot-rows.md"],
    ["docs/three-machines.md"],
    ["docs/own-loop.md"],
    ["docs/wrap.md"],
    ["docs/explain.md"],
    ["docs/size.md"],
    ["docs/more-machines.md"],
    ["docs/operations.md"],
    ["docs/database.md"],
]

LONG = (
    *("docs/memory-budget.md", "docs/pruning.md", "docs/row-file.md"),
    "docs/more-machines.md",
    "docs/simulate.md",
    *("docs/hot-rows.md", "docs/three-machines.md", "docs/own-loop.md", "docs/database.md"),
    "docs/wrap.md",
    "docs/explain.md",
)


def blocks_of(page):
    """(language, text, kind of note, its value) of each fenced block."""
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def run_line(line, monkeypatch):
    """Run one line of a shell block: `rowhaul` in this process, other programs as they are installed."""
    words = shlex.split(line)
    if words[0] == "rowhaul":
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, line
        return
    program = Path(sys.executable).parent / words[0]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run([program, *words[1:]], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "pages",
    [pytest.param(one, marks=[pytest.mark.slow] if one[-1] in LONG else [], id=one[-1]) for one in CHAINS],
)
def test_snippets_run(pages, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    num_run = 0
    for page in pages:
        names = {"__name__": "__main__"}
        for language, text, note, value in blocks_of(page):
            if note == "file":  # a line of a shell block will run it
                Path(value).write_text(text)
            elif language == "python":
                exec(compile(text, page, "exec"), names)
                num_run += 1
            elif language == "sh":
                for line in text.splitlines():
                    run_line(line, monkeypatch)
                    num_run += 1
    assert num_run or not any(
        language in ("python", "sh") for page in pages for language, *_ in blocks_of(page)
    )


def test_every_page_with_snippets_is_in_a_chain():
    pages = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    with_code = {page for page in pages if any(block[0] in ("python", "sh") for block in blocks_of(page))}
    assert with_code <= {page for chain in CHAINS for page in chain}


def test_the_documented_configuration_is_the_default():
    (text,) = [text for _, text, note, _ in blocks_of("docs/configuration.md") if note == "config"]
    assert TrainConfig.from_dict(yaml.safe_load(text)) == TrainConfig()
    documented = yaml.safe_load(text)
    assert documented == TrainConfig().to_dict()


def anchors_of(page):
    """What a link can point to in a page: its headings, as GitHub writes them in addresses."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                found = page.parent / target if target else page
                assert found.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in anchors_of(found), f"{page.name} links to {target}#{anchor}"
