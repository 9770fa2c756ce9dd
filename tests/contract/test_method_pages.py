"""The pages of methods: each recipe has one, each has its sections, what they name exists, and figures are current."""

from __future__ import annotations

import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from benchmarks import method_pages
from benchmarks.method_claims import METHOD_PAGES
from benchmarks.method_overview import Measured

import sorl_trl
from sorl_trl import SeeUPOConfig, SOGRPOConfig, SOPPOConfig
from tests.documentation import ROOT, code_blocks, documented_metrics
from tests.named_tests import function_of

PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
SECTIONS = [
    "Overview",
    "Usage",
    "What is implemented and where",
    "What was measured beside what was reported",
    "Curves",
]
CONFIGS = (SOGRPOConfig, SOPPOConfig, SeeUPOConfig)
SETTINGS = re.compile("quickstart|_lora|_qwen")
"""Recipes that are no method of their own."""
LARGEST_PICTURE = 60 * 1024

of_each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


@cache
def measured() -> Measured:
    return method_pages.read_all()


def recipes_of(text: str) -> set[str]:
    return set(re.findall(r"^Recipe: `recipes/(\w+)\.yaml`$", text, re.MULTILINE))


def named_after(label: str, text: str) -> list[str]:
    """What a paragraph that begins with a bold label has in backticks."""
    (paragraph,) = re.findall(rf"^\*\*{label}\*\*(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", paragraph)


def test_every_recipe_of_a_method_has_one_page() -> None:
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml") if not SETTINGS.search(path.stem)}
    named = [name for path in PAGES for name in recipes_of(path.read_text())]
    assert sorted(named) == sorted(recipes)


def test_every_page_is_one_of_the_generators() -> None:
    assert {path.stem for path in PAGES} <= set(METHOD_PAGES)
    recipes = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    due = {name for name, page in METHOD_PAGES.items() if not page.recipes or recipes.intersection(page.recipes)}
    assert {path.stem for path in PAGES} == due


@of_each_page
def test_it_has_the_recipes_of_its_claims(path: Path) -> None:
    assert recipes_of(path.read_text()) == set(METHOD_PAGES[path.stem].recipes)


@of_each_page
def test_it_has_every_section(path: Path) -> None:
    assert re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE) == SECTIONS


@of_each_page
def test_every_function_is_where_it_says(path: Path) -> None:
    named = re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", path.read_text())
    assert named
    for name, file in named:
        source = (ROOT / "src" / "sorl_trl" / file).read_text()
        assert re.search(rf"^(def|class) {name}\b", source, re.MULTILINE), f"{file} has no {name}"


@of_each_page
def test_every_option_is_one(path: Path) -> None:
    fields = {each.name for config in CONFIGS for each in dataclasses.fields(config)}
    text = path.read_text()
    listed = [name for name in named_after("Options.", text) if not name.endswith(".md")]
    assert listed
    assert {*listed, *re.findall(r"`(\w+)=", text)} - fields == set()


@of_each_page
def test_every_metric_is_documented(path: Path) -> None:
    assert set(named_after("Metrics.", path.read_text())) - documented_metrics() == set()


@of_each_page
def test_every_trap_has_a_test(path: Path) -> None:
    (traps,) = re.findall(r"\*\*Traps, and the test that has each\.\*\*\n\n(.*?)\n\n", path.read_text(), re.DOTALL)
    lines = re.split(r"\n(?=- )", traps)
    named = [re.findall(r"`tests/([\w/]+\.py::[\w:]+)`", line) for line in lines]
    assert len(lines) > 1 and all(len(names) == 1 for names in named), lines
    for (name,) in named:
        assert inspect.isfunction(function_of(name))


@of_each_page
def test_each_config_can_be_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(config_class: Any) -> Any:
        return lambda **fields: config_class(use_cpu=True, bf16=False, **fields)

    for config in CONFIGS:
        monkeypatch.setattr(sorl_trl.trainers, config.__name__, on_cpu(config))
    blocks = code_blocks(path, "python")
    assert blocks
    for block in blocks:
        exec(block, {})


@of_each_page
def test_its_figures_are_current(path: Path) -> None:
    made = method_pages.measured_part(path.stem, METHOD_PAGES[path.stem], measured())
    text = path.read_text()
    assert method_pages.renewed(text, made) == text, "run `python -m benchmarks.method_pages`"


@of_each_page
def test_its_picture_is_there_and_small(path: Path) -> None:
    shown = re.findall(r"!\[[^]]*\]\(([^)]+\.png)\)", path.read_text())
    sizes = [(path.parent / name).stat().st_size for name in shown]
    assert all(size <= LARGEST_PICTURE for size in sizes)
    assert bool(shown) == (method_pages.PICTURES / f"{path.stem}.png").is_file()


def test_the_overview_is_current() -> None:
    text = method_pages.OVERVIEW.read_text()
    assert text == method_pages.overview_page(measured(), [*method_pages.existing_pages()])


def test_the_paper_index_links_to_every_page() -> None:
    linked = set(re.findall(r"\(methods/(\w+)\.md\)", (ROOT / "docs" / "paper_index.md").read_text()))
    assert linked == {path.stem for path in PAGES}
