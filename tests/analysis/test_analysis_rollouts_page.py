"""The page of rollouts in a real Chromium: what a reader does on it, and what it never does."""

import re

import pandas as pd
import pytest

from analysis.rollouts.__main__ import main
from analysis.runs.token_colours import background
from tests.support.analysis_runs import REAL_RUNS
from tests.support.browser import faults
from tests.support.rollout_runs import HOSTILE, SETTLED, write_rollout_runs

OTB = "run=otb-n4-seed0&step=40&prompt=0"
PAIR = OTB + "&with=grpo-n4-seed0&with-step=40"
VALUES = """const facts = [...document.querySelectorAll("#token-values div")];
return Object.fromEntries(facts.map(one => one.innerText.split("\\n")))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = write_rollout_runs(tmp_path_factory.mktemp("runs"))
    assert main([str(folder)]) == 0
    return folder / "rollouts.html"


@pytest.fixture
def opened(chrome, page):
    """Opens the page at an address; afterwards it must have been silent, alone, and without an error."""

    def open_at(fragment=OTB, **window):
        chrome.open(page, fragment, **window)
        chrome.wait(SETTLED)
        return chrome

    with chrome.silent():
        yield open_at


def token(chrome, rollout: int, t: int, side: int = 0):
    """The element of an own token; t from 0."""
    script = "const [i, t, side] = arguments, rollout = views[side].rollouts[i]; views[side].fill(rollout);"
    return chrome.js(script + "return rollout.spans[t]", rollout, t, side)


def address(chrome) -> str:
    """The fragment, once it has been written."""
    chrome.wait("return location.hash === '#' + address()")
    return chrome.js("return location.hash.slice(1)")


# ---- load and choose


def test_page_opens_on_the_last_step_and_shows_its_rollouts_one_above_the_other(opened):
    chrome = opened("")
    assert chrome.texts("section > header")[0].startswith(
        "GRPO, N=4, seed 0\ngrpo-n4-seed0\nstep 40, prompt 0, 3 rollouts"
    )
    heads = chrome.texts(".headline")
    assert [re.sub(r"\s+", " ", head) for head in heads] == [
        "rollout 0 reward 1 10 tokens advantage +0.750 to +0.955 energy 5.00",
        "rollout 1 reward 0 7 tokens 3 tool tokens advantage −0.250 to −0.063 energy 3.50",
        "rollout 2 unscored 60 tokens truncated advantage +0.000 energy 30.00",
    ]
    tops = chrome.js("return [...document.querySelectorAll('article')].map(one => one.getBoundingClientRect().top)")
    assert tops == sorted(tops) and len(set(tops)) == 3
    assert chrome.find(".count").text == "3 rollouts, mean reward 0.5"


def test_run_step_and_prompt_are_chosen_and_stand_in_the_address(opened):
    from selenium.webdriver.support.ui import Select

    chrome = opened("")
    Select(chrome.find("#run")).select_by_visible_text("OTB, N=4, seed 0")
    chrome.wait("return document.querySelector('h2').innerText.startsWith('OTB')")
    Select(chrome.find("#step")).select_by_visible_text("20")
    chrome.wait("return document.querySelector('section > header').innerText.includes('step 20')")
    chrome.window.find_elements("css selector", "#prompts button")[2].click()
    chrome.wait("return document.getElementById('prompt').textContent === 'how many apples ?'")
    assert address(chrome) == "run=otb-n4-seed0&step=20&prompt=2"
    assert [one.text for one in chrome.window.find_elements("css selector", "#prompts [aria-current]")] == [
        "how many apples ?\nprompt 2, mean reward 0.5"
    ]


# ---- a token


def test_pointer_over_a_token_shows_its_numbers_and_moves_the_cursor_of_the_charts(opened):
    chrome = opened()
    chrome.point(token(chrome, 0, 3))
    assert chrome.find("#token-place").text == "own token 4 of 10, rollout 0"
    assert chrome.find("#token-text").text.strip() == "="
    assert chrome.js(VALUES) == {
        "probability π": "0.5",
        "score norm w": "0.5",
        "energy W": "2",  # 4 * 0.5
        "baseline B": "0.2",  # 1 / (3 + 2)
        "advantage A": "+0.8",
        "return R": "1",
    }
    assert chrome.texts(".chart-value") == ["0.2", "2"]
    lines = chrome.js("return [...document.querySelectorAll('.cursor')].map(line => +line.getAttribute('x1'))")
    assert lines == chrome.js("return views[0].charts.map(chart => chart.x(3))")
    chrome.point(chrome.find("h1"))
    assert chrome.find("#token-place").text == "Point at a token, or tap it."


def test_pointer_over_a_chart_shows_the_token_of_the_nearest_line(opened):
    from selenium.webdriver import ActionChains

    chrome = opened()
    chart = chrome.find("svg")
    place = chrome.js("const c = views[0].charts[0]; return [c.x(4) - c.width / 2, 0]")
    ActionChains(chrome.window).move_to_element_with_offset(chart, *map(round, place)).perform()
    assert chrome.find("#token-place").text.startswith("own token 5 of ")
    assert chrome.js("return document.querySelectorAll('.marked').length") == 1


def test_a_click_keeps_a_token_and_its_address_leads_back_to_it(opened):
    chrome = opened()
    token(chrome, 1, 2).click()
    chrome.point(chrome.find("h1"))
    assert chrome.find("#token-place").text == "own token 3 of 7, rollout 1"
    kept = address(chrome)
    assert kept == OTB + "&rollout=1&token=3" and chrome.find("#token-link").get_attribute("href").endswith(kept)
    opened(OTB + "&rollout=2&token=60&by=energy", height=500)
    assert chrome.find("#token-place").text == "own token 60 of 60, rollout 2"
    assert chrome.js("const box = marked.getBoundingClientRect(); return box.top > 0 && box.bottom < innerHeight")
    assert chrome.js("return marked === views[0].rollouts[2].spans[59]")
    assert chrome.find("[name=by]:checked").get_attribute("value") == "energy"


def test_an_address_that_is_not_on_the_page_shows_the_first_group(opened):
    assert opened("run=gone&step=7&prompt=0&rollout=3&token=5").find("h2").text == "GRPO, N=4, seed 0"


# ---- keys


def test_keys_go_through_prompts_steps_colours_and_tokens(opened):
    from selenium.webdriver import Keys

    chrome = opened()
    chrome.press("n")
    chrome.wait("return page.groups[views[0].place].prompt === 1")
    chrome.press("p")
    chrome.wait("return page.groups[views[0].place].prompt === 0")
    chrome.press("[")
    chrome.wait("return document.querySelector('section > header').innerText.includes('step 20')")
    chrome.press("4")
    assert chrome.find("[name=by]:checked").get_attribute("value") == "score norm"
    chrome.js("document.querySelector('#prompt').focus()")
    chrome.press(Keys.TAB)
    assert chrome.find("#token-place").text == "own token 1 of 10, rollout 0"
    chrome.press(Keys.ARROW_RIGHT + Keys.ARROW_RIGHT + Keys.ARROW_DOWN)
    assert chrome.find("#token-place").text == "own token 3 of 7, rollout 1"
    chrome.press(Keys.END)
    assert chrome.find("#token-place").text == "own token 7 of 7, rollout 1"
    chrome.press(Keys.ARROW_RIGHT)  # there is none further
    assert address(chrome) == "run=otb-n4-seed0&step=20&prompt=0&by=score+norm&rollout=1&token=7"
    outline = chrome.js("const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.outlineWidth")
    assert outline == "solid2px"
    chrome.press(Keys.ESCAPE)
    assert address(chrome) == "run=otb-n4-seed0&step=20&prompt=0&by=score+norm"
    chrome.press("?")
    assert "next, previous prompt" in chrome.find("dialog").text


def test_keys_typed_into_the_search_only_search(opened):
    chrome = opened()
    chrome.press("/")
    chrome.press("n 7")
    assert chrome.find("#search").get_attribute("value") == "n 7"
    assert chrome.js("return page.groups[chosen.place].prompt") == 0


# ---- search and filter


def test_search_finds_prompts_of_all_runs_and_steps(opened):
    chrome = opened()
    chrome.find("#search").send_keys("APPLES")
    assert chrome.find("#prompts-found").text == "4 prompts found in all runs and steps"
    assert (
        chrome.texts("#prompts button")[3] == "how many apples ?\nOTB, N=4, seed 0, step 40, prompt 2, mean reward 0.5"
    )
    chrome.press("\n")
    chrome.wait("return document.getElementById('prompt').textContent === 'how many apples ?'")
    chrome.find("#search").clear()
    chrome.find("#search").send_keys("pears")
    assert chrome.find("#prompts-found").text == "0 prompts found in all runs and steps"


@pytest.mark.parametrize(
    ("field", "value", "left"),
    [
        ("#lowest-reward", "0.5", [0]),
        ("#highest-reward", "0", [1]),
        ("#shortest", "8", [0, 2]),
        ("#longest", "10", [0, 1]),
        ("#ending", "truncated", [2]),
    ],
)
def test_rollouts_are_filtered_by_reward_length_and_ending(opened, field, value, left):
    chrome = opened()
    chrome.find(field).send_keys(value)
    assert chrome.texts("h3") == [f"rollout {number}" for number in left]
    assert chrome.find(".count").text.startswith(f"{len(left)} of 3 rollouts")
    assert chrome.js("return document.querySelectorAll('figure:first-child .line').length") == len(left)
    chrome.find("#show-all").click()
    assert len(chrome.texts("h3")) == 3


def test_prompts_without_a_rollout_that_passes_are_left_out_of_the_list(opened):
    chrome = opened()
    chrome.find("#longest").send_keys("3")
    assert chrome.find("#prompts-found").text == "0 prompts, 3 without a rollout that passes the filters"


# ---- colours


def test_tokens_have_the_colours_of_the_terminal_and_the_legend_says_them(opened):
    chrome = opened()
    for by, value in {
        "advantage": 1 - 1 / 2,
        "baseline": 1 / 2,
        "energy": 0.5,
        "score norm": 0.5,
        "probability": 0.5,
    }.items():
        chrome.find(f"[name=by][value='{by}'] + span").click()
        channels = list(map(int, re.findall(r"\d+", token(chrome, 0, 0).value_of_css_property("background-color"))))
        limit = chrome.js("return views[0].look.limit")
        assert channels == pytest.approx([*background(value, limit, by), 1], abs=1)  # halves are rounded otherwise
        assert limit == pytest.approx({"advantage": 10 / 11, "energy": 30.0}.get(by, 0.5), abs=1e-3)
    assert chrome.find(".legend").text.split() == ["1", "0"]  # a probability of 1 is white
    chrome.find("[name=by][value='advantage'] + span").click()
    assert re.sub(r"\s+", " ", chrome.find(".legend").text) == "−0.909 less likely more likely +0.909"


def test_the_page_opens_on_a_run_with_energies_and_says_why_another_has_none(chrome, tmp_path):
    folder = write_rollout_runs(tmp_path)
    for file in (folder / "grpo-n4-seed0" / "rollouts").glob("step-*.parquet"):
        pd.read_parquet(file).assign(energies=None, log_probs=None).to_parquet(file)
    assert main([str(folder)]) == 0
    with chrome.silent():
        chrome.open(folder / "rollouts.html", "")
        chrome.wait(SETTLED)
        assert chrome.texts("section > header")[0].startswith("OTB, N=4, seed 0") and chrome.find("#lacking").text == ""
        chrome.open(folder / "rollouts.html", "run=grpo-n4-seed0&step=40&prompt=0")
        chrome.wait(SETTLED)
        assert chrome.find("#lacking").text == (
            "This run did not record energy, score norm, probability: log_energy=true does."
        )


def test_older_files_offer_what_they_hold(opened):
    chrome = opened("run=rloo-n4-seed0&step=40&prompt=0")
    enabled = chrome.js(
        "return [...document.getElementsByName('by')].filter(one => !one.disabled).map(one => one.value)"
    )
    assert enabled == ["advantage", "energy", "score norm"]
    assert chrome.find("#lacking").text == "An older version wrote this run, without baseline, probability."
    assert chrome.texts("figcaption") == ["realized energy W"]
    chrome.point(token(chrome, 0, 2))
    values = chrome.js(VALUES)
    assert values["probability π"] == values["baseline B"] == "–" and values["energy W"] == "1"


def test_a_value_that_is_not_finite_stands_out_and_one_that_is_absent_has_no_colour(opened):
    from selenium.webdriver.support.color import Color

    chrome = opened("run=rloo-n4-seed0&step=40&prompt=0")
    chrome.js("views[0].rollouts[0].advantage[1] = NaN; views[0].recolour(views[0].look)")
    shown = token(chrome, 0, 1)
    assert Color.from_string(shown.value_of_css_property("background-color")).hex == "#1b1f24"  # that of text
    chrome.js("views[0].recolour({...views[0].look, by: 'probability'})")
    assert Color.from_string(shown.value_of_css_property("background-color")).alpha == "0"


def test_dark_pages_are_dark_and_every_token_can_be_read(opened):
    chrome = opened(OTB, dark=True)
    assert chrome.js("return getComputedStyle(document.body).backgroundColor") == "rgb(24, 28, 32)"
    worst = chrome.js("""
      const light = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], .05);
      const read = text => light(text.match(/[\\d.]+/g).map(Number));
      let worst = 21;
      for (const by in QUANTITIES) { colourBy(by); for (const span of document.querySelectorAll(".t")) {
        const style = getComputedStyle(span), pair = [read(style.color), read(style.backgroundColor)];
        worst = Math.min(worst, Math.max(...pair) / Math.min(...pair)); } }
      return worst""")
    assert worst >= 4.5


# ---- tools, side by side, text


def test_tool_calls_and_output_fold(opened):
    chrome = opened()
    folds = chrome.window.find_elements("css selector", "article:nth-child(2) details.tool")
    assert [fold.get_attribute("open") for fold in folds] == ["true", None]  # what the policy sampled is seen at first
    assert [re.sub(r"\s+", " ", fold.find_element("css selector", "summary").text) for fold in folds] == [
        "tool call, 3 tokens",
        "tool output, 3 tokens 15",
    ]
    chrome.find("#fold").click()
    assert [fold.get_attribute("open") for fold in folds] == [None, None]
    opened(OTB + "&rollout=1&token=3")  # inside the call
    chrome.find("#unfold").click()
    assert chrome.find("article:nth-child(2) .output").text.strip(" \n\u21b5") == "15"


def test_a_link_into_a_folded_call_unfolds_it(opened):
    chrome = opened()
    chrome.find("#fold").click()
    chrome.js("goTo(0, 1, 2)")
    assert token(chrome, 1, 2).is_displayed()


def test_two_arms_stand_side_by_side_on_one_prompt_with_one_scale(opened):
    from selenium.webdriver.support.ui import Select

    chrome = opened()
    beside = Select(chrome.find("#beside"))
    assert [one.text for one in beside.options] == [
        "nothing", "GRPO, N=4, seed 0, step 20", "GRPO, N=4, seed 0, step 40", "step 20"]  # fmt: skip
    beside.select_by_visible_text("GRPO, N=4, seed 0, step 40")
    chrome.wait("return !document.getElementById('group-view-1').hidden")
    assert chrome.texts("h2") == ["OTB, N=4, seed 0", "GRPO, N=4, seed 0"]
    left, right = (box.rect for box in chrome.window.find_elements("css selector", "section"))
    assert left["y"] == right["y"] and left["x"] + left["width"] < right["x"]
    assert chrome.js("return views[0].look.limit === views[1].look.limit && views[0].look.limit")
    chrome.point(token(chrome, 0, 3, side=1))
    assert chrome.js(VALUES)["baseline B"] == "0.1"  # half of OTB's
    chrome.js("document.activeElement.blur()")
    chrome.press("n")  # the other arm follows
    chrome.wait("return page.groups[views[0].place].prompt === 1 && page.groups[views[1].place].prompt === 1")
    assert address(chrome) == "run=otb-n4-seed0&step=40&prompt=1&with=grpo-n4-seed0&with-step=40"


def test_a_link_leads_to_a_token_of_the_right_side(opened):
    chrome = opened(PAIR + "&side=1&rollout=0&token=4")
    assert chrome.js("return marked === views[1].rollouts[0].spans[3]")
    assert chrome.js(VALUES)["baseline B"] == "0.1"


def test_text_that_looks_like_html_is_shown_as_text(opened):
    chrome = opened("run=otb-n4-seed0&step=40&prompt=1")
    assert chrome.find("#prompt").text == f"{HOSTILE}<!-- & ?"
    assert token(chrome, 0, 5).text == HOSTILE
    assert token(chrome, 0, 6).text == "\\x1b[2J"
    assert chrome.js("return [document.images.length, document.title]") == [0, chrome.find("h1").text]


# ---- any window, any reader


@pytest.mark.parametrize("width", [1280, 800, 390])
@pytest.mark.parametrize("fragment", [OTB, PAIR, OTB + "&rollout=1&token=3&by=probability"])
def test_nothing_is_wider_than_the_window(opened, width, fragment):
    chrome = opened(fragment, width=width)
    assert chrome.js("return document.documentElement.scrollWidth") <= width
    wide = """return [...document.querySelectorAll("body *")].filter(one => !one.closest(".skip, .hidden, .find, svg")
      && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80))"""
    assert chrome.js(wide) == []
    assert chrome.js("return views[0].charts.every(chart => chart.width === chart.svg.clientWidth)")


def test_charts_follow_the_width_of_the_window(opened):
    chrome = opened()
    before = chrome.js("return views[0].charts[0].width")
    chrome.resize(800, 900)
    chrome.wait("return views[0].charts[0].width < arguments[0]", before)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    ("width", "fragment"), [(1280, PAIR + "&rollout=1&token=3"), (390, OTB + "&rollout=0&token=2")]
)
def test_axe_finds_no_fault_in_contrast_labels_or_structure(opened, dark, width, fragment):
    assert faults(opened(fragment, dark=dark, width=width)) == []


def test_the_real_runs_of_the_repository_open(chrome, tmp_path):
    assert main([str(REAL_RUNS), "--out", str(tmp_path / "page.html")]) == 0
    chrome.complaints()
    chrome.open(tmp_path / "page.html")
    chrome.wait(SETTLED)
    assert len(chrome.texts("#run option")) == 12 and chrome.complaints() == []
