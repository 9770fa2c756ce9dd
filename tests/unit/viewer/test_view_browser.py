"""The page in a real browser: what is shown, what keys do, and that nothing is fetched or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.qa import Question
from sorl_trl.types import Action, ActionKind, Observation, Passage, StopReason, Trajectory, Turn
from sorl_trl.viewer.data import EVALUATION, TRAINING, Entry, evaluation_entry, training_entry
from sorl_trl.viewer.page import Page, render_page
from tests.unit.evaluation.trajectories import answered, ended, evaluated, question
from tests.unit.viewer.chromium import EXECUTABLE, Browser, browser
from tests.unit.viewer.entries import TRAINED

pytestmark = [pytest.mark.browser, pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium")]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture(autouse=True)
def nothing_goes_wrong(tab: Browser) -> Iterator[None]:
    tab.complaints.clear()
    tab.requests.clear()
    yield
    assert tab.complaints == []
    assert {url.partition(":")[0] for url in tab.requests} <= {"file", "about"}


@pytest.fixture
def show(tab: Browser, tmp_path: Path) -> Any:
    def show(*entries: Entry, kind: str = EVALUATION, fragment: str = "", notes: list[str] | None = None) -> None:
        page = Page("Mine", kind, entries, len(entries), notes or [])
        (tmp_path / "page.html").write_text(render_page(page), "utf-8")
        tab.open(tmp_path / "page.html", fragment)

    return show


def text(tab: Browser, selector: str) -> list[str]:
    return tab.run(f"Array.from(document.querySelectorAll({selector!r}), (each) => each.textContent)")


def choose(tab: Browser, name: str, value: str) -> None:
    event = "new Event('input', { bubbles: true })"
    tab.run(f"byId({name!r}).value = {value!r}; byId({name!r}).dispatchEvent({event}); 0")


def keys_listed(tab: Browser) -> list[str]:
    return tab.run("listed.map((entry) => entry.key)")


def run_of_five() -> list[Entry]:
    gold = question("Ada")
    rows = [
        evaluated(gold, answered("Ada", searches=2)),
        evaluated(gold, answered("Bob", searches=1)),
        evaluated(gold, ended(StopReason.TURN_LIMIT)),
        evaluated(gold, ended(StopReason.SEARCH_UNAVAILABLE), dataset="musique"),
        evaluated(gold, answered("ada"), dataset="musique"),
    ]
    return [replace(evaluation_entry(row), key=f"{row.dataset}/{i}") for i, row in enumerate(rows)]


SEARCH = Turn((1, 2), "<think>Who?</think> <search> the <b> \u202eend </search>", Action(ActionKind.SEARCH, "the <b>"))
SEEN = Observation(
    (3,),
    "\n<information>Doc 1 …</information>\n",
    (
        Passage("p1", "Lovelace", "By the U.S. Navy: ADA, lovelace. Adamant.", 2.5),
        Passage("p2", "<img src=x onerror=alert(1)>", "none </script>\x00\x00\x00\x00\x00\x00"),
    ),
    truncated=True,
    neutralized=3,
)
ANSWER = Turn((4,), "<answer> the Ada Lovelace </answer>", Action(ActionKind.ANSWER, "the Ada Lovelace"))
FULL = evaluated(
    Question("q1", "who\u200b ?", ("Ada Lovelace", "US"), {"hops": 2, "is_yes": True, "year": 1999}),
    Trajectory((0,), (SEARCH, SEEN, ANSWER), StopReason.ANSWERED),
)


class TestTrajectory:
    def test_what_is_shown_of_an_evaluation(self, tab: Browser, show: Any) -> None:
        show(evaluation_entry(FULL))
        assert text(tab, "h2.question") == ["whoU+200B ?"]
        assert text(tab, ".stamp") == ["✓ right stopped: answered"]
        assert text(tab, ".given .value") == ["the Ada Lovelace", "Ada LovelaceUS"]
        assert text(tab, ".facts div")[-3:] == ["hops2", "is yestrue", "year1999"]
        assert {"exact match1", "searches1"} <= set(text(tab, ".measures div"))
        assert text(tab, ".turn > header") == ["Turn 1search2 tokens", "Turn 2answer1 token"]
        assert text(tab, ".turn > .body .think") == ["Who?"]
        assert text(tab, ".turn > .body .search") == [" the <b> U+202Eend "]
        assert text(tab, ".turn > .body .tag")[-2:] == ["<answer>", "</answer>"]
        assert text(tab, ".observation > header") == ["Environment1 tokentruncated3 neutralized"]
        assert text(tab, ".passage > summary") == ["1. Lovelacescore 2.5gold", "2. <img src=x onerror=alert(1)>"]
        assert text(tab, ".passage > .body")[1] == "none </script>U+0000 U+0000 U+0000 U+0000 and 2 more"
        assert text(tab, ".read > .body") == ["<information>Doc 1 …</information>"]

    def test_gold_answers_are_marked_as_whole_words(self, tab: Browser, show: Any) -> None:
        show(evaluation_entry(FULL))
        assert text(tab, ".passage > .body mark") == ["ADA, lovelace"], "U.S. is two words, Adamant is one"
        assert text(tab, ".turn mark") == ["Ada Lovelace"]

    def test_options_with_the_right_one(self, tab: Browser, show: Any) -> None:
        asked = Question("q", "who ?", ("Ada",), options={"A": "Bob", "B": "Ada"})
        show(evaluation_entry(evaluated(asked, answered("B"))))
        assert text(tab, ".given li") == ["Ada", "A. Bob", "B. Ada ✓"]
        assert text(tab, ".given li.right") == ["B. Ada ✓"]


class TestList:
    def test_filters_with_counts(self, tab: Browser, show: Any) -> None:
        show(*run_of_five(), notes=["3 are left out."])
        assert text(tab, "#notes") == ["3 are left out."]
        assert text(tab, "#group option") == ["all (5)", "nq (3)", "musique (2)"]
        assert text(tab, "#verdict option") == ["all (5)", "right (2)", "wrong (2)", "not scored (1)"]
        assert text(tab, "#searches option") == ["all (5)", "0 (2)", "1 (1)", "2 (1)", "unknown (1)"]
        choose(tab, "verdict", "right")
        assert keys_listed(tab) == ["nq/0", "musique/4"]
        assert text(tab, "#group option") == ["all (2)", "nq (1)", "musique (1)"]
        assert text(tab, "#verdict option")[2] == "wrong (2)", "what the filter itself would let through"
        choose(tab, "group", "musique")
        assert keys_listed(tab) == ["musique/4"]
        assert text(tab, "#count") == ["1 of 5 trajectories"]

    def test_sorting(self, tab: Browser, show: Any) -> None:
        show(*run_of_five())
        choose(tab, "order", "searches")
        assert keys_listed(tab) == ["nq/2", "musique/4", "nq/1", "nq/0", "musique/3"]
        tab.run("byId('direction').click()")
        assert keys_listed(tab) == ["nq/0", "nq/1", "nq/2", "musique/4", "musique/3"], "the unknown stays last"
        choose(tab, "order", "order")
        assert keys_listed(tab) == ["musique/4", "musique/3", "nq/2", "nq/1", "nq/0"]


class TestKeys:
    def test_stepping_follows_the_list_as_it_is(self, tab: Browser, show: Any) -> None:
        show(*run_of_five())
        seen = []
        for key in ("j", "ArrowDown", "ArrowDown", "k", "ArrowUp", "k", "k"):
            tab.press(key)
            seen.append(tab.run("location.hash"))
        assert seen == ["#nq/1", "#nq/2", "#musique/3", "#nq/2", "#nq/1", "#nq/0", "#nq/0"]
        choose(tab, "verdict", "right")
        tab.press("j")
        assert tab.run("current.key") == "musique/4"
        assert text(tab, "a[aria-current]")[0].startswith("✓who ?musique")

    def test_filtering_by_text_and_back(self, tab: Browser, show: Any) -> None:
        show(*run_of_five())
        tab.press("/", "b", "o", "b")
        assert keys_listed(tab) == ["nq/1"], "in the filter, letters are letters"
        tab.press("Escape")
        assert tab.run("byId('text').value") == "bob"
        assert tab.run("document.activeElement.getAttribute('href')") == "#nq/1"

    def test_escape_goes_back_to_the_list(self, tab: Browser, show: Any) -> None:
        show(*run_of_five())
        tab.press("j", "Escape")
        assert tab.run("document.activeElement.getAttribute('href')") == "#nq/1"
        tab.press("j")
        assert tab.run("document.activeElement.getAttribute('href')") == "#nq/2"

    def test_the_address_names_the_trajectory(self, tab: Browser, show: Any) -> None:
        odd = replace(run_of_five()[0], key="nq/50 % #1/0")
        show(*run_of_five(), odd, fragment="nq/50%20%25%20%231/0")
        assert tab.run("current.key") == "nq/50 % #1/0"
        show(*run_of_five(), fragment="nq/99%")
        assert text(tab, "main") == ["There is no trajectory nq/99% on this page."]
        tab.press("j")
        assert tab.run("current.key") == "nq/0"


class TestTraining:
    ENTRIES = (
        training_entry(TRAINED, "step-10/1"),
        training_entry(replace(TRAINED, ratios=(1.0,) * 7, reward=None), "step-10/2"),
    )

    def show_tokens(self, tab: Browser, show: Any, name: str) -> list[str]:
        show(*self.ENTRIES, kind=TRAINING)
        tab.run(f"color(QUANTITIES.find((each) => each.name === {name!r}))")
        return tab.run("Array.from(document.querySelectorAll('.token'), (each) => each.className)")

    def test_the_header_of_a_turn_has_its_figures(self, tab: Browser, show: Any) -> None:
        show(*self.ENTRIES, kind=TRAINING)
        figures = text(tab, ".turn:nth-of-type(2) .figure")
        assert figures == ["ratio 0.8", "advantage −1", "clipped 33 %", "outside, with gradient 33 %"]
        assert text(tab, ".turn > .body .search") == [" who"]
        assert text(tab, ".observation > *") == ["Environment, or not trained on1 token", "[Ada]"]
        assert text(tab, "#verdict option") == ["all (2)", "reward above 0 (1)", "no reward (1)"]

    def test_tokens_are_those_that_were_trained_on(self, tab: Browser, show: Any) -> None:
        masked = replace(TRAINED, turn_ids=(-1,) * 7, stop_reason="search_unavailable")
        show(self.ENTRIES[0], training_entry(masked, "step-10/2"), kind=TRAINING)
        assert text(tab, "#list li:first-child small span")[1:3] == ["1 search", "6 trained tokens"]
        assert text(tab, "#list li:last-child small span")[1:3] == ["not trained on", "reward 0.5"]
        assert text(tab, "#searches option") == ["all (2)", "1 (1)", "unknown (1)"]
        tab.press("j")
        assert text(tab, ".observation h3") == ["Not trained on"]

    def test_colours_of_ratios_diverge_around_1_in_log_space(self, tab: Browser, show: Any) -> None:
        classes = self.show_tokens(tab, show, "token_ratios")
        # The scale ends at 2 (98 % of the way from 0.5 to 2), so that 0.5 is its other end; 1.1 is 1/7 of the way.
        assert classes == [f"token {name}" for name in ("middle", "above-1", "below-4", "middle", "above-4", "middle")]
        labels = text(tab, ".legend .swatch")
        assert (len(labels), labels[0], labels[4], labels[8]) == (9, "≤ 0.5", "1", "≥ 2")

    def test_colours_of_advantages_diverge_around_0(self, tab: Browser, show: Any) -> None:
        classes = self.show_tokens(tab, show, "advantages")
        assert classes == ["token below-4"] * 3 + ["token above-1"] * 3

    def test_clip_states_do_not_rely_on_colour(self, tab: Browser, show: Any) -> None:
        assert self.show_tokens(tab, show, "clipped")[:3] == ["token inside", "token outside", "token clipped"]
        style = "getComputedStyle(document.querySelectorAll('.token')[{}]).textDecorationLine"
        assert [tab.run(style.format(i)) for i in range(3)] == ["none", "underline", "line-through"]
        assert len(text(tab, ".legend .swatch")) == 3

    def test_brackets_step_through_the_quantities(self, tab: Browser, show: Any) -> None:
        show(*self.ENTRIES, kind=TRAINING)
        seen = []
        for key in "]]]]][":
            tab.press(key)
            seen.append(tab.run("byId('quantity').value"))
        assert seen == ["token_ratios", "advantages", "clipped", "none", "ratios", "none"]
        tab.press("j")
        assert tab.run("byId('quantity').value") == "none", "kept for the next trajectory"

    def test_a_token_tells_its_numbers(self, tab: Browser, show: Any) -> None:
        show(*self.ENTRIES, kind=TRAINING)
        tab.run("document.querySelector('.token').focus()")
        tab.press("ArrowRight", "ArrowRight", "]")
        assert text(tab, "#numbers") == [
            '" </search>" turn 1, token 3: ratio in the loss 0.8, of the token 0.5, advantage −1, '
            "outside, the gradient is gone"
        ]

    def test_extreme_ratios_are_sorted_by_their_distance_from_1(self, tab: Browser, show: Any) -> None:
        far = [training_entry(replace(TRAINED, ratios=(r,) * 7), str(r)) for r in (1.5, 0.5, 1.0, float("inf"))]
        show(*far, kind=TRAINING)
        choose(tab, "order", "extreme")
        assert keys_listed(tab) == ["1.0", "1.5", "0.5", "inf"]
