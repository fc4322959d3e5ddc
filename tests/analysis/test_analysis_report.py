"""Claims and their verdicts, the report from the command line, the page in a real browser, the excerpt."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from analysis import style
from analysis.claims.rules import CLAIMS, NOT_SUPPORTED, RULES, SEEDS, SUPPORTED, UNDECIDED, Comparison
from analysis.excerpt import excerpt, without_paths
from analysis.report.__main__ import main, make_report
from analysis.report.claims import claims_table, decisions
from analysis.report.drawing import Drawn
from analysis.report.parts import Part
from analysis.report.watch import announce
from analysis.runs.load import load
from analysis.runs.marks import setting_differences, setting_labels
from otb.errors import STOPPED_FROM_KEYBOARD
from tests.support.analysis_runs import REAL_RUNS, write_run, write_sweep
from tests.support.browser import faults
from tests.support.commands import help_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = write_sweep(tmp_path_factory.mktemp("sweep"), sizes=(4,))
    write_run(folder, "otb", 4, seed=9, state="running")
    assert main([str(folder), "--target", "0.8"]) == 0
    return folder / "report"


@pytest.fixture
def no_files(monkeypatch):
    """Reports without PDF, PNG and CSV files of their figures."""

    def save(axes, path, title, about):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".png").write_bytes(b"")
        style.plt.close("all")
        return [path.with_suffix(".png")]

    monkeypatch.setattr("analysis.report.drawing.save", save)


@pytest.fixture
def quick(no_files, monkeypatch):
    """Reports whose figures are made and not rendered, which takes most of the time."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **options: file.write("<svg></svg>"))


def decided(folder, target=0.8) -> dict[str, Comparison]:
    return dict(zip(CLAIMS, decisions(load(folder, cache=False).used, target), strict=True))


# ---- claims on synthetic sweeps whose truth is known (the rules themselves: test_claims.py)


def test_every_claim_of_the_paper_has_a_rule_and_a_row(tmp_path):
    table = claims_table(list(decided(write_sweep(tmp_path)).values()))
    assert list(table.claim) == ["C1", "C2", "C3", "C4", "C5"] and set(table.claim) <= set(RULES)
    assert set(table.verdict) <= {SUPPORTED, NOT_SUPPORTED, UNDECIDED} and (table.why != "").all()


def test_the_proxy_alone_never_decides_the_variance_claim(tmp_path):
    c1 = decided(write_sweep(tmp_path))["C1"]
    assert c1.verdict == UNDECIDED and "no variance" in c1.why and c1.what.endswith("(proxy)")


def noisy(folder, signal=lambda step: 0.5, seeds=SEEDS):
    """OTB's gradient is ten times as large as RLOO's: noise 100 against 2, signal 50 against `signal` on average."""
    for seed in range(seeds):
        jitter = 1 + 0.001 * seed
        otb = {"gradient_noise": 100.0 * jitter, "gradient_signal": 50.0, "verl_noise": 0.01}
        write_run(folder, "otb", 4, seed, steps=4, every=2, measures=lambda step, row=otb: row)
        rloo = {"gradient_noise": 2.0 * jitter, "verl_noise": 0.01}
        row = lambda step, row=rloo: row | {"gradient_signal": signal(step)}  # noqa: E731
        write_run(folder, "rloo", 4, seed, steps=4, every=2, measures=row)
    return decided(folder)["C1"]


def test_measured_noise_is_compared_relative_to_the_signal(tmp_path):
    c1 = noisy(tmp_path)  # 100 / 50 against 2 / 0.5: half
    assert c1.verdict == SUPPORTED and c1.effect.estimate == pytest.approx(0.5, abs=0.01)
    assert "proxy" not in c1.what


def test_few_seeds_leave_every_claim_about_runs_undecided(tmp_path):
    c1 = noisy(tmp_path / "noise", seeds=5)
    assert c1.verdict == UNDECIDED and c1.why == "fewer than 10 seeds (N=4: 5)"
    found = decided(write_sweep(tmp_path / "runs"))
    assert {found[claim].verdict for claim in ("C2", "C3", "C4")} == {UNDECIDED}
    assert all("fewer than 10 seeds" in found[claim].why for claim in ("C2", "C3", "C4"))


def test_a_signal_that_is_negative_in_single_steps_enters_by_its_sum(tmp_path):
    c1 = noisy(tmp_path, signal=lambda step: 3.0 if step % 2 else -2.0)
    assert c1.verdict == SUPPORTED and c1.effect.estimate == pytest.approx(0.5, abs=0.01)


def test_a_signal_that_drowned_leaves_the_variance_claim_undecided(tmp_path):
    c1 = noisy(tmp_path, signal=lambda step: -0.1, seeds=3)
    assert c1.verdict == UNDECIDED and "drowned" in c1.why


def test_missing_arms_of_a_claim_come_with_their_command(tmp_path):
    c3 = decided(write_sweep(tmp_path, sizes=(4,)))["C3"]
    assert c3.verdict == UNDECIDED and "baseline=rloo group_size=32 seed=0,1,2" in c3.why


def test_tokens_saved_are_the_ratio_of_the_crossings(tmp_path):
    c4 = decided(write_sweep(tmp_path))["C4"]
    assert c4.effect.estimate == pytest.approx(1 - 0.75 / 8, abs=0.01) and c4.what.endswith("to 0.800")
    # seeds cross 0.8 at otb: linear in 0.4 + 0.03 s .. 0.9 at 20; rloo: 0.4 + 0.02 s; each pair by hand for seed 0:
    # step 15 against step 20, a quarter saved; the faster seeds 1 and 2 differ by a per cent


def test_overhead_is_a_ratio_to_the_loss(tmp_path):
    c5 = decided(write_sweep(tmp_path))["C5"]
    assert c5.verdict == SUPPORTED and c5.effect.estimate == pytest.approx(0.04 / 0.45)
    assert c5.why == "0.04 of the time of a step"


def test_claims_without_their_metrics_say_which(tmp_path):
    path = write_run(tmp_path)
    rows = [{"step": i, "reward_mean": 0.5} for i in range(1, 4)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "evaluations.jsonl").unlink()
    assert all(found.verdict == UNDECIDED and found.why for found in decided(tmp_path).values())


# ---- the report


def test_the_report_has_claims_tables_figures_and_runs(report):
    text = (report / "report.md").read_text()
    assert text.count("| C") >= 5 and "left out: otb-n4-seed9: not finished" in text
    names = {file.name for file in (report / "figures").iterdir()}
    for name in ("gradient_norm_and_accuracy_n4", "token_consumption", "stability_n4", "token_positions"):
        assert {f"{name}.pdf", f"{name}.png", f"{name}.csv"} <= names
    for link in re.findall(r"\]\((\S+\.png)\)", text):
        assert (report / link).exists()


def test_the_page_needs_no_network(report):
    page = (report / "report.html").read_text()
    loaded = re.findall(r"""(?:src|href)=["']([^"'#]+)""", page) + re.findall(r"url\(([^)]+)\)", page)
    assert all(link.startswith(("data:", "figures/", "#", '"#')) for link in loaded), loaded
    assert "<script src" not in page and "@import" not in page.replace("@import url", "")
    assert "5&lt;script&gt;" in page  # text of a sample, escaped


# ---- the page in a browser


@pytest.fixture
def opened(chrome, report):
    """Opens the page; afterwards it must have been silent, alone, and without an error."""

    def open_at(fragment="", **window):
        chrome.open(report / "report.html", fragment, **window)
        return chrome

    with chrome.silent():
        yield open_at


def test_the_page_begins_with_the_result_its_figure_what_was_run_and_verdicts(opened, report):
    chrome = opened(width=1280)
    heads = [head.removesuffix("#").strip() for head in chrome.texts("h2")][:4]
    assert heads == ["Result", "What was run", "Verdicts on the paper's claims", "Contents"]
    result, run, verdicts = chrome.texts("table")[:3]
    # accuracies are capped at 0.9: OTB's last two evaluations are 0.9, the others' are 0.9 as well
    assert "OTB 3 0.9 [0.9, 0.9]" in result and "GRPO 3 0.9 [0.9, 0.9] 0 [0, 0] 3 0.5" in result
    assert "Final held-out accuracy: mean of the last two evaluations" in chrome.find(".muted").text
    assert chrome.js("return document.querySelector('figure').getBoundingClientRect().top") < 500
    assert "arithmetic, tiny policy" in run and "OTB, GRPO, RLOO" in run and "3 seeds" in run
    assert "supported 0.0889 [0.0889, 0.0889] time of score norms" in verdicts
    assert "undecided 1.04 [1.03, 1.06], of a proxy" in verdicts  # which is no variance
    assert f"Made by python -m analysis.report {report.parent} --target 0.8" in chrome.find("figcaption").text
    assert "figures/held-out_accuracy_over_own_tokens_n4.csv" in chrome.find("figure a[href$=csv]").get_attribute(
        "href"
    )


def test_headings_are_words_and_the_contents_lead_to_every_section(opened):
    chrome = opened()
    heads = chrome.js("return [...document.querySelectorAll('h2')].map(one => one.textContent)")
    assert "arithmetic, tiny policy#" in heads  # no other setting, so nothing has to distinguish it
    ids = chrome.js("return [...document.querySelectorAll(':is(h1, h2, h3, h4, h5)[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids)) > 15
    links = chrome.js("return [...document.querySelectorAll('.contents a')].map(one => one.hash.slice(1))")
    assert len(links) == 7 and set(links) <= set(ids)
    anchors = chrome.js("return [...document.querySelectorAll('.anchor')].map(one => one.hash.slice(1))")
    assert sorted([*anchors, "contents"]) == sorted(ids)
    assert "Gradient norm and accuracy, N=4" in "\n".join(chrome.texts("h4"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800])
def test_figures_fill_the_column_and_nothing_overflows(opened, width, dark):
    chrome = opened(width=width, dark=dark)
    assert chrome.js("return document.documentElement.scrollWidth") == width
    rows = chrome.js("""
      const rows = new Map();
      for (const one of document.querySelectorAll("figure")) {
        const key = Math.round(one.getBoundingClientRect().top + scrollY);
        rows.set(key, (rows.get(key) ?? 0) + one.querySelector("svg").getBoundingClientRect().width);
      }
      return [document.querySelector(".figures").clientWidth, [...rows.values()]]""")
    column, pictures = rows
    assert column >= 0.85 * width and pictures[0] > 0.9 * column  # the first figure stands alone
    assert min(pictures) > (0.4 if width == 1280 else 0.9) * column
    paper = chrome.js("return getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(24, 28, 32)" if dark else "rgb(255, 255, 255)")
    tables = chrome.js("return [...document.querySelectorAll('table')].every(one => one.parentNode.matches('.wide'))")
    assert tables


def test_tables_sort_by_number_both_ways(opened):
    chrome = opened()
    seed = chrome.js(
        """return [...document.querySelectorAll("table.sortable")].at(-1).querySelectorAll("th button")[3]"""
    )
    seeds = (
        """return [...arguments[0].closest("table").tBodies[0].rows].map(row => Number(row.children[3].textContent))"""
    )
    for order in ("ascending", "descending"):
        chrome.js("arguments[0].click()", seed)
        shown = chrome.js(seeds, seed)
        assert shown == sorted(shown, reverse=order == "descending") and set(shown) == {0, 1, 2, 9}
        assert chrome.js("return arguments[0].parentNode.ariaSort", seed) == order


def test_a_line_and_a_name_open_their_run_and_a_figure_is_enlarged(opened):
    chrome = opened()
    line = """document.querySelector('g[id="run:otb-n4-seed0"] path')"""
    chrome.js(line + """.dispatchEvent(new MouseEvent("click", {bubbles: true}))""")
    text = chrome.find("#dialog").text
    assert "otb-n4-seed0" in text and "learning_rate: 0.001" in text and "reward 1, 3 own tokens" in text
    chrome.find("#dialog button").click()
    chrome.js("""document.querySelector('[data-open="otb-n4-seed1"]').click()""")
    assert "otb-n4-seed1" in chrome.find("#dialog").text
    chrome.find("#dialog button").click()
    chrome.find("button.zoom").click()
    zoomed = chrome.js("""
      const svg = document.querySelector("#dialog svg"), before = svg.viewBox.baseVal.width;
      svg.dispatchEvent(new WheelEvent("wheel", {deltaY: -1, clientX: 300, clientY: 300, cancelable: true}));
      return svg.viewBox.baseVal.width / before""")
    assert zoomed == pytest.approx(0.8)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_fault_in_contrast_labels_or_structure(opened, dark):
    chrome = opened(dark=dark)
    chrome.js("for (const one of document.querySelectorAll('details')) one.open = true")
    assert faults(chrome) == []
    chrome.js("""document.querySelector('[data-open="otb-n4-seed1"]').click()""")
    assert chrome.js("return dialog.open") and faults(chrome) == []


def test_the_page_prints_without_buttons_and_with_whole_figures(opened):
    chrome = opened(dark=True)
    chrome.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not chrome.find("button.zoom").is_displayed() and not chrome.find(".contents").is_displayed()
        assert chrome.find("figure").value_of_css_property("break-inside") == "avoid"
        assert chrome.find(".wide").value_of_css_property("max-height") == "none"
        assert chrome.js("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    finally:
        chrome.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


# ---- a report that is watched


def test_a_watched_report_draws_only_what_changed(tmp_path, quick, monkeypatch, capsys):
    folder = write_sweep(tmp_path, seeds=1)
    run = write_run(folder, "otb", 32, seed=1, state="running")
    made, looks = [], iter(["nothing happens", "the run finishes", "nothing happens", "Ctrl-C"])

    def draw(figures, folder):
        made.append([figure.name for figure in figures])
        return [Drawn(figure, problem="not drawn here") for figure in figures]

    def sleep(seconds):
        assert seconds == 7
        event = next(looks)
        if event == "Ctrl-C":
            raise KeyboardInterrupt
        if event == "the run finishes":
            (run / "status.json").write_text(json.dumps({"state": "finished", "step": 40, "steps": 40}))

    monkeypatch.setattr("analysis.report.drawing.draw_side_by_side", draw)
    monkeypatch.setattr("analysis.report.watch.time.sleep", sleep)
    assert main([str(folder), "--watch", "7"]) == STOPPED_FROM_KEYBOARD == 130
    assert len(made) == 2 and "variance_n4" in made[0]
    assert "variance_n32" in made[1] and not any(name.endswith("n4") for name in made[1])
    said = capsys.readouterr()
    assert "a look every 7 s" in said.out and f"{len(made[1])} figures drawn" in said.out
    assert said.err.count("not finished") == 1 and "stopped" in said.err
    assert (folder / "report" / "report.version.js").read_text() == 'renewed("");\n'


def test_a_watch_waits_for_the_first_run_to_finish_and_refuses_what_can_never_work(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, state="running")

    def sleep(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("analysis.report.watch.time.sleep", sleep)
    assert main([str(tmp_path), "--watch"]) == 130
    assert "waiting: " in capsys.readouterr().out
    assert main([str(tmp_path), "--watch", "0"]) == 2 and main([str(tmp_path / "absent"), "--watch"]) == 2
    said = capsys.readouterr().err
    assert "--watch 0 is no pause" in said and "absent is not a folder" in said


def test_an_open_page_renews_itself_and_keeps_its_place(chrome, tmp_path, quick):
    folder = write_sweep(tmp_path, seeds=1, sizes=(4,))
    run = write_run(folder, "otb", 4, seed=9, state="running")
    page = make_report(folder, watched=5)
    order = """return [...document.querySelector("#runs ~ .wide").querySelectorAll("tbody tr")].map(
      row => row.cells[3].textContent)"""
    top = "return document.getElementById('runs').getBoundingClientRect().top"
    with chrome.silent():
        chrome.open(page, "verdicts", width=800, height=300)
        assert "looked at every 5 s" in chrome.find("#watched").text
        chrome.js("""
          const box = document.querySelector("#runs ~ .wide"), seed = box.querySelectorAll("th button")[3];
          seed.click(); seed.click();
          document.querySelector("[id$=claims] ~ details").open = true;
          box.scrollLeft = 40;
          box.scrollIntoView(); scrollBy(0, 30); seed.focus({preventScroll: true}); window.isOld = true;""")
        before = chrome.js(top)
        assert before < 0 and chrome.js(order) == ["9", "0", "0", "0"]
        (run / "status.json").write_text(json.dumps({"state": "finished", "step": 40, "steps": 40}))
        make_report(folder, watched=5)
        chrome.wait("return !window.isOld && document.readyState === 'complete'")
        assert "4 runs, all of them used" in chrome.find("body").get_attribute("textContent")
        assert chrome.js(top) == pytest.approx(before, abs=2) and chrome.js("return location.hash") == "#verdicts"
        assert chrome.js(order) == ["9", "0", "0", "0"]
        assert chrome.js("return document.querySelector('#runs ~ .wide').scrollLeft") == 40
        assert chrome.js("return document.querySelector('[id$=claims] ~ details').open")
        assert chrome.js("return document.activeElement.textContent") == "seed"
        announce(page, "")
        chrome.wait("return document.getElementById('watched').textContent.includes('not renewed any more')")


# ---- what a report says of unusual folders


def test_two_settings_get_a_part_each(tmp_path, quick):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", changes={"learning_rate": 0.01})
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert sorted(re.findall(r"## (arithmetic, .*)\n", text)) == [
        f"arithmetic, tiny policy, learning_rate={rate}" for rate in ("0.001", "0.01")
    ]
    assert "### Claims" not in text and "undecided" not in text  # no rival was run
    assert "learning_rate</code>: 0.001, 0.01" in (tmp_path / "out" / "report.html").read_text()


def test_a_setting_keeps_the_underscores_of_its_task_and_a_hash_where_several_keys_differ(tmp_path):
    tools = {"task": {"_target_": "otb.tasks.arithmetic_tools.ArithmeticTools", "train_prompts": 64}}
    write_run(tmp_path / "a", changes=tools)
    write_run(tmp_path / "b", changes=tools | {"learning_rate": 0.01, "prompts_per_step": 8})
    write_run(tmp_path / "c", changes=tools | {"learning_rate": 0.1}, state="running")  # left out
    runs = load(tmp_path, cache=False).runs
    first, second = sorted(set(runs.setting[runs.left_out == ""]))
    assert first.startswith("arithmetic_tools-tiny#")
    assert setting_labels(runs) == {name: name.partition("#")[2] for name in (first, second)}
    assert setting_differences(runs) == {
        "learning_rate": ["0.001", "0.01"],
        "prompts_per_step": ["8", "absent or default"],
    }


def test_one_seed_gives_tables_without_empty_columns_and_verdicts_that_are_folded(tmp_path, quick):
    write_run(tmp_path, "otb", steps=20, every=20, rate=0.0201)
    write_run(tmp_path, "grpo", steps=20, every=20, rate=0.02)
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "| arm | seeds | final accuracy | OTB minus this arm | shared seeds | P(OTB is better) |\n" in text
    assert "| OTB | 1 | 0.802 |  |  |  |\n| GRPO | 1 | 0.8 | 0.002 | 1 | 1 |\n" in text
    assert "the only evaluation after step 0" in text and "an arm with fewer than 3 seeds has none" in text
    assert (
        "| arm | seeds | before | final | best | mean |\n" in text and " low |" not in text.partition("### Claims")[0]
    )


def test_verdicts_are_folded_where_all_of_them_are_undecided(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(Part, "is_decided", False)
    write_sweep(tmp_path, seeds=1, sizes=(4,))
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<details><summary>all undecided: these runs decide none of the claims</summary>" in page


def test_one_run_gives_a_report_that_says_what_is_missing(tmp_path, quick, capsys):
    assert main([str(write_run(tmp_path))]) == 0
    text = (tmp_path / "otb-n4-seed0" / "report" / "report.md").read_text()
    assert "| OTB | 1 | 0.9 |\n" in text and "### Claims" not in text  # there is no rival to compare it with


@pytest.mark.parametrize("folder", ["absent", "empty", "unfinished"])
def test_errors_are_short_and_say_the_fix(tmp_path, capsys, folder):
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "unfinished", state="running")
    assert main([str(tmp_path / folder)]) == 2
    said = capsys.readouterr().err
    assert "error: " in said and any(fix in said for fix in ("Give a folder", "run.py", "--include unfinished"))


def test_help_answers_before_anything_heavy_is_imported():
    assert "--target" in help_of("analysis.report")


# ---- the excerpt and the real runs in the repository


def test_an_excerpt_loads_alike_and_names_no_machine(tmp_path):
    environment = {"host": "node17", "executable": "/home/me/python", "versions": {"otb": "0.1.0"}}
    run = write_run(tmp_path / "runs", environment=environment)
    (run / "checkpoints").mkdir()
    write_run(tmp_path / "runs", seed=1, state="running")
    copies = excerpt(tmp_path / "runs", tmp_path / "small")
    assert [copy.name for copy in copies] == ["otb-n4-seed0"] and not (copies[0] / "checkpoints").exists()
    text = "".join(file.read_text() for file in copies[0].iterdir() if file.is_file())
    assert "node17" not in text and "/home" not in text and str(tmp_path) not in text
    small, whole = (load(tmp_path / name).used.select_dtypes("number") for name in ("small", "runs"))
    assert small.accuracy.notna().sum() == 40
    assert np.allclose(small, whole, rtol=1e-5, atol=0, equal_nan=True)


def test_paths_are_cut_and_hub_ids_are_not():
    assert without_paths("runs_dir: /scratch/me/runs\nname: Qwen/Qwen3-8B") == "runs_dir: runs\nname: Qwen/Qwen3-8B"
    assert without_paths("path: ~/data/gsm8k") == "path: gsm8k"


def test_the_real_runs_in_the_repository_give_a_whole_report(tmp_path, no_files):
    copy = tmp_path / "runs"
    shutil.copytree(REAL_RUNS, copy)
    assert main([str(copy)]) == 0
    text = (copy / "report" / "report.md").read_text()
    assert "Not drawn" not in text and "nan" not in text.lower().replace("finance", "")


def test_the_real_runs_name_no_machine():
    for file in REAL_RUNS.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert not re.search(rb"/tmp/|/root|/home/|\bhost\b|executable", content), file
            assert str(ROOT).encode() not in content, file
    assert sum(file.stat().st_size for file in REAL_RUNS.rglob("*") if file.is_file()) < 900_000


def test_an_incomplete_grid_is_reported_and_its_whole_arms_are_drawn(tmp_path, quick):
    write_sweep(tmp_path, sizes=(4, 32))
    for seed in range(3):
        shutil.rmtree(tmp_path / f"rloo-n32-seed{seed}")
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    assert "Not drawn: Accuracy by group size. The grid lacks 1 of 6 cells: RLOO, N=32." in text
    assert "without the arms that lack a size: RLOO" in text


def test_plain_trl_runs_alone_give_their_curves(tmp_path, quick):
    (tmp_path / "theirs").mkdir()
    history = [{"step": step, "loss": 0.1, "reward": 0.5} for step in range(1, 5)]
    state = {"global_step": 4, "max_steps": 4, "log_history": history}
    (tmp_path / "theirs" / "trainer_state.json").write_text(json.dumps(state))
    assert main([str(tmp_path)]) == 0
    assert (tmp_path / "report" / "figures" / "reward_over_steps.png").exists()
    assert "Not drawn" not in (tmp_path / "report" / "report.md").read_text()
