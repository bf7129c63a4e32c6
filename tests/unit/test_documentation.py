"""What the Markdown files name exists: links, files, functions, make targets, modules, commands."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from cluster.cli.config import shipped_configs
from cluster.cli.main import app
from cluster.common.settings import Settings

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "cluster",
    "router",
    "encoder_worker",
    "decoder_worker",
    "configs",
    "benchmark",
    "tests",
)
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(
            page
            for folder in FOLDERS
            for page in (ROOT / folder).rglob("*.md")
            if "node_modules" not in page.parts
        ),
    ]
)
FRONT_PAGE_BYTES = 9 * 1024
LINK = re.compile(r"\]\(([^()\s]+)\)")
PLACE = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w/?")
PYTHON_FILE = re.compile(r"(?<![\w./-])[\w./-]+\.py\b")
FUNCTION = re.compile(r"`(?:\w+\.)?(\w+)\(\)`")
CLASS = re.compile(r"`([A-Z][a-z]+[A-Z]\w+)`")
TARGET = re.compile(r"\bmake ((?:[a-z]+-)*[a-z]+)\b")
MODULE = re.compile(r"python -m ((?:benchmark|tests|cluster)[\w.]*\w)")
COMMAND = re.compile(r"splitscribe ([a-z]+)(?!\w)")
CONFLICT = re.compile(r"^(?:<{7}|={7}|>{7})(?: |$)", re.MULTILINE)
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_of(page: Path) -> list[str]:
    """What is written as code: the lines of fenced blocks without their comments, and spans."""
    text = page.read_text()
    lines = [
        re.sub(r"(^|\s)# .*", "", line)
        for block in FENCED.findall(text)
        for line in block.splitlines()
    ]
    return [*lines, *SPAN.findall(FENCED.sub("", text))]


def anchors(page: Path) -> set[str]:
    """The names that a browser jumps to, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def found(page: Path, name: str) -> list[Path]:
    """What a page may mean by a file's name: from the root, from its own folder, or a bare one."""
    exact = [folder / name for folder in (ROOT, page.parent) if (folder / name).exists()]
    if exact or "/" in name:
        return exact
    return [file for folder in FOLDERS for file in (ROOT / folder).rglob(name)]


def test_the_pages_are_found() -> None:
    names = {str(page.relative_to(ROOT)) for page in PAGES}
    assert names >= {"README.md", "CONTRIBUTING.md", "benchmark/README.md", "configs/README.md"}


def test_the_front_page_stays_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= FRONT_PAGE_BYTES


@each_page
def test_no_conflict_of_two_versions_is_left(page: Path) -> None:
    assert not CONFLICT.search(page.read_text())


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@each_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    shipped = {one.name for one in shipped_configs()}
    code = "\n".join(code_of(page))
    named = {*PLACE.findall(code), *PYTHON_FILE.findall(code)}
    assert sorted(one for one in named if one not in shipped and not found(page, one)) == []


def functions_beside_files(page: Path) -> Iterator[tuple[str, str]]:
    """(file, name) for each `name()` on a line that names one Python file."""
    for line in page.read_text().splitlines():
        files = set(PYTHON_FILE.findall(line))
        if len(files) == 1:
            yield from ((next(iter(files)), name) for name in FUNCTION.findall(line))


@each_page
def test_a_function_named_beside_a_file_is_defined_there(page: Path) -> None:
    missing = []
    for file, name in functions_beside_files(page):
        sources = [one.read_text() for one in found(page, file)]
        if not any(re.search(rf"\b(?:def|class) {name}\b", source) for source in sources):
            missing.append(f"{name} in {file}")
    assert missing == []


@each_page
def test_every_class_that_is_named_exists(page: Path) -> None:
    sources = [file.read_text() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    defined = {name for source in sources for name in re.findall(r"\bclass (\w+)", source)}
    alerts = set(
        re.findall(r"alert: (\w+)", (ROOT / "configs/observability/rules.yaml").read_text())
    )
    assert set(CLASS.findall(page.read_text())) <= defined | alerts


@each_page
def test_every_make_target_exists(page: Path) -> None:
    (phony,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {target for line in code_of(page) for target in TARGET.findall(line)}
    assert named <= set(phony.split())


@each_page
def test_every_module_that_is_run_exists(page: Path) -> None:
    paths = {
        name: name.replace(".", "/") for line in code_of(page) for name in MODULE.findall(line)
    }
    missing = [
        name
        for name, path in paths.items()
        if not ((ROOT / f"{path}.py").exists() or (ROOT / path / "__main__.py").exists())
    ]
    assert missing == []


def test_no_code_of_the_front_page_is_broken_by_a_new_line() -> None:
    text = FENCED.sub("", (ROOT / "README.md").read_text())
    assert [line for line in text.splitlines() if line.count("`") % 2] == []


@each_page
def test_every_command_of_ours_exists(page: Path) -> None:
    command = typer.main.get_command(app)
    named = {name for line in code_of(page) for name in COMMAND.findall(line)}
    assert named <= set(command.commands)  # type: ignore[attr-defined]


@each_page
def test_settings_in_yaml_are_settings(page: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        Settings.model_validate(yaml.safe_load(block))


def test_the_drawing_of_the_front_page_can_be_read_on_light_and_on_dark() -> None:
    name = "configs/images/path.svg"
    drawn = ET.fromstring((ROOT / name).read_text())
    assert f"]({name})" in (ROOT / "README.md").read_text()
    texts = [element for element in drawn.iter() if element.tag.endswith("}text")]
    assert len(texts) > 10, "text stays text"
    style = next(element.text or "" for element in drawn.iter() if element.tag.endswith("}style"))
    light, _, dark = style.partition("@media (prefers-color-scheme: dark)")
    for part in (light, dark):
        assert re.search(r"\.page \{ fill: #\w{6}", part), "it has a background of its own"
        assert re.search(r"text \{[^}]*fill: #\w{6}", part)
