"""The browser of rollouts up to its page: what is read, packed, cut and refused. Its page in a browser: *_page.py."""

import base64
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import palette
from analysis.rollouts import collect, pack
from analysis.rollouts.__main__ import main
from analysis.rollouts.read import Strings, read_groups
from analysis.runs.token_colours import FULL_COLOURS, background
from otb.errors import RunError
from tests.support.analysis_runs import write_run
from tests.support.commands import help_of
from tests.support.rollout_runs import ANSWER, CALL, HOSTILE, PROMPTS, write_rollout_runs, write_rollouts

ROOT = Path(__file__).resolve().parents[2]


class Scripts(HTMLParser):
    """The contents of the script elements of a page, by their id, as a browser takes them apart."""

    def __init__(self, page: str):
        super().__init__()
        self.found, self.inside = {}, None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.inside = dict(attributes).get("id", "program") if tag == "script" else None

    def handle_data(self, data):
        if self.inside:
            self.found[self.inside] = self.found.get(self.inside, "") + data


def unpacked(blob: str, tokens: int, own: int, values: list[str]) -> dict[str, np.ndarray]:
    """What data.js makes of a group's blob."""
    planes, at, arrays = gzip.decompress(base64.b64decode(blob)), 0, {}
    for name, count, kind in [("tokens", tokens, "<u4"), *((value, own, "<f4") for value in values)]:
        raw = np.frombuffer(planes, np.uint8, 4 * count, at).reshape(4, count).T.tobytes()
        arrays[name], at = np.frombuffer(raw, kind), at + 4 * count
    assert at == len(planes)
    return arrays


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return write_rollout_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(runs) -> str:
    assert main([str(runs)]) == 0
    return (runs / "rollouts.html").read_text(encoding="utf8")


# ---- what is read and packed


def test_a_packed_group_has_every_token_and_number_of_the_file(runs):
    strings = Strings()
    group = next(read_groups([runs / "otb-n4-seed0" / "rollouts" / "step-00000040.parquet"], strings))
    arrays = unpacked(pack.blob(group), 80, 77, list(pack.VALUES))  # 10 + 10 + 60 tokens, 3 of them a tool's
    texts = list(strings.numbers)
    shown = [texts[number % pack.TOOL] for number in arrays["tokens"][:20]]
    assert shown[:5] == ANSWER[:5] and shown[5] == HOSTILE and shown[10:13] == CALL[:3]
    assert shown[6:9] == [
        "\\x1b[2J",
        "\u21b5\n",
        "\\u202ex",
    ]  # what would move the cursor or turn the text is spelled out
    assert [number >= pack.TOOL for number in arrays["tokens"][10:20]] == [False] * 5 + [True] * 3 + [False] * 2
    assert np.allclose(arrays["baseline"][:3], [1 / 2, 1 / 3, 1 / 4], rtol=pack_error())
    assert np.allclose(arrays["advantage"][:3], [1 / 2, 2 / 3, 3 / 4], rtol=pack_error())
    assert set(arrays["score norm"]) == {0.5}  # of every rollout by itself: the energies begin anew
    assert np.allclose(arrays["log_prob"], np.log(0.5), rtol=pack_error())


def pack_error() -> float:
    """Half a unit in the last place that is kept: 23 bits less those dropped, and one that is not written."""
    return 2.0 ** -(24 - pack.DROPPED_BITS)


def test_rounding_keeps_three_digits_of_any_size_and_what_is_not_finite():
    values = np.array([1e-30, -3.14159, 0.999999, 123456.7, 0.0, np.inf, -np.inf, np.nan], np.float32)
    short = pack.rounded(values).view(np.float32)
    assert np.allclose(short[:5], values[:5], rtol=pack_error(), atol=0)
    assert short[5:7].tolist() == [np.inf, -np.inf] and np.isnan(short[7])
    assert not (pack.rounded(values[:5]) & ((1 << pack.DROPPED_BITS) - 1)).any()


def test_older_files_lack_what_they_lack(page):
    groups = {(g["run"], g["step"], g["prompt"]): g for g in json.loads(Scripts(page).found["data"])["groups"]}
    assert groups[2, "40", 0]["values"] == ["advantage", "score norm"] and groups[2, "40", 0]["endings"] is None
    assert groups[1, "40", 0]["values"] == list(pack.VALUES)
    assert groups[1, "40", 0]["endings"] == ["end", "end", "length"]


def test_groups_say_their_rewards_and_lengths_before_they_are_unpacked(page):
    data = json.loads(Scripts(page).found["data"])
    group = next(g for g in data["groups"] if g["run"] == 1 and g["prompt"] == 0)
    assert group["rewards"] == [1.0, 0.0, None]
    assert group["lengths"] == [10, 7, 60] and group["tools"] == [0, 3, 0]
    assert [run["label"] for run in data["runs"]] == ["GRPO, N=4, seed 0", "OTB, N=4, seed 0", "RLOO, N=4, seed 0"]
    assert len(Scripts(page).found) == 2 + len(data["groups"])  # the facts, a blob for each group, the program


def test_rollouts_of_a_failed_step_stand_beside_those_that_were_kept(tmp_path):
    run = write_run(tmp_path)
    write_rollouts(run, 40, 1.0, name="failed")
    steps = [group["step"] for group in collect.collect([run]).groups]
    assert steps == ["40"] + ["40 (failed)"] * 3


def test_runs_of_one_arm_and_seed_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        write_run(tmp_path / folder)
    labels = [run["label"] for run in collect.collect([tmp_path]).runs]
    assert labels == ["OTB, N=4, seed 0 (a/otb-n4-seed0)", "OTB, N=4, seed 0 (b/otb-n4-seed0)"]


# ---- bounds


def test_a_full_page_has_groups_of_every_run_at_its_last_step_and_says_what_is_left_out(runs, monkeypatch):
    """Room for 400 tokens, groups of 80: 133 for the first run, 320 / 2 for the second, the rest for the third."""
    monkeypatch.setattr(collect, "MAX_TOKENS", 400)
    found = collect.collect([runs])
    shown = [(group["run"], group["step"], group["prompt"]) for group in found.groups]
    assert shown == [(0, "40", 0), (1, "40", 0), (1, "40", 1), (2, "40", 0)]
    assert found.tokens == 3 * 80 + 6 and len(found.runs) == 3
    (note,) = found.notes
    assert "shows 4 prompt groups with 246 tokens, and takes 5,000 groups and 400 tokens" in note
    assert "3 groups of the steps that are shown and all of 2 earlier steps are left out; --steps" in note


def test_runs_without_room_are_not_offered(runs, monkeypatch):
    monkeypatch.setattr(collect, "MAX_GROUPS", 1)
    found = collect.collect([runs])
    assert [run["name"] for run in found.runs] == ["grpo-n4-seed0"] and "2 runs have no rollouts" in found.notes[0]


def test_long_rollouts_large_groups_and_long_prompts_are_cut_and_say_so(runs, monkeypatch):
    monkeypatch.setattr(pack, "MAX_ROLLOUT_TOKENS", 7)
    monkeypatch.setattr(pack, "MAX_ROLLOUTS", 2)
    monkeypatch.setattr(pack, "MAX_PROMPT_CHARACTERS", 20)
    found = collect.collect([runs / "otb-n4-seed0"], steps=[20])
    group = found.groups[0]
    assert group["text"] == PROMPTS[0][:20] and group["rollouts"] == [0, 1]
    assert group["shown"] == [7, 7] and group["own"] == [7, 5] and group["lengths"] == [10, 7]
    assert group["cuts"] == [
        "1 more rollouts of this group are not on this page, which takes 2",
        f"the prompt has {len(PROMPTS[0]) - 20} more characters",
        "2 rollouts are cut after 7 tokens",
    ]
    assert unpacked(found.blobs[0], 14, 12, group["values"])["score norm"].tolist() == [0.5] * 12


# ---- what is refused


def test_what_cannot_be_shown_is_refused_with_the_fix(runs, tmp_path, capsys):
    for arguments, message in {
        (str(tmp_path / "absent"),): "is not a folder. Give run directories",
        (str(tmp_path),): "is no run directory: it has no config.yaml",
        (str(runs), "--steps", "twenty"): "--steps=twenty is no list of steps. Write whole numbers and commas",
        (str(runs), "--steps", "30"): "--steps=30: no rollouts of these were kept; kept: 20, 40.",
    }.items():
        assert main(list(arguments)) == 2
        assert message in capsys.readouterr().err


def test_a_damaged_file_is_named_and_left_out(tmp_path):
    run = write_run(tmp_path)
    write_rollouts(run, 20, 1.0)
    file = run / "rollouts" / "step-00000040.parquet"
    rows = pd.read_parquet(file)
    rows["advantages"] = [row[:-1] for row in rows.advantages]
    rows.to_parquet(file)
    found = collect.collect([run])
    assert {group["step"] for group in found.groups} == {"20"}
    assert "step-00000040.parquet is damaged: row 0 has 3 tokens, 3 of them own" in found.notes[0]
    file.write_bytes(b"PAR1")
    assert "step-00000040.parquet is damaged, or no file of rollouts" in collect.collect([run]).notes[0]
    with pytest.raises(RunError, match="No rollouts could be read"):
        collect.collect([run], steps=[40])


# ---- the page


def test_no_text_of_a_rollout_can_end_its_script_element(page):
    data = json.loads(Scripts(page).found["data"])
    assert HOSTILE in data["strings"] and {group["text"] for group in data["groups"]} >= set(PROMPTS)
    assert HOSTILE not in page


def test_the_page_names_no_address_and_forbids_all(page):
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}  # the name of a vocabulary
    assert "default-src 'none'" in page and "src=" not in page.replace("\\u003c/script>\\u003cimg src=x", "")


def test_colours_are_the_palettes_everywhere():
    style = (ROOT / "analysis" / "paper.mplstyle").read_text()
    cycle = re.findall(r"[0-9A-F]{6}", style.split("cycler", 1)[1].splitlines()[0])
    assert [f"#{colour}" for colour in cycle] == [*palette.LINES[:7], palette.YELLOW]
    assert FULL_COLOURS["advantage"] == (palette.rgb(palette.ORANGE), palette.rgb(palette.SKY_BLUE))
    assert background(0.5, 0.5, "baseline") == (204, 121, 167) and background(-1, 1, "baseline") == (86, 180, 233)
    assert background(1.0, 9.0, "probability") == (255, 255, 255) and background(0.0, 9.0, "probability") == (
        240,
        228,
        66,
    )


def test_help_answers_before_anything_heavy_is_imported():
    assert "--steps" in help_of("analysis.rollouts")
