"""The front page and all others: code, links, commands and numbers are those of the repository."""

import csv
import re
import subprocess
from pathlib import Path

import pytest
import torch

from otb.advantages import advantages
from otb.baselines import is_unbiased
from otb.baselines.otb import otb
from otb.rollouts import RolloutGroups
from otb.score_norms import log_sum_squared_probs, logit_gradient_proxy
from tests.support.baselines import configured_baselines

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf8")
TRAILS = (ROOT / "docs" / "README.md").read_text(encoding="utf8")
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT, capture_output=True, text=True, check=True,
).stdout.split()  # fmt: skip
PAGES = sorted(page for page in LISTED if (ROOT / page).exists())
VERDICTS = ROOT / "study" / "verdicts.csv"
NOISE = ROOT / "docs" / "figures" / "noise.csv"
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
HEADING_LINK = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
COMMAND = re.compile(r"(?:^    |`)((?:python|make) [^`\n]*)", re.MULTILINE)


def links_of(page: str) -> list[str]:
    """The relative links of a Markdown page."""
    targets = LINK.findall((ROOT / page).read_text(encoding="utf8"))
    return [target for target in targets if not target.startswith(("http", "mailto:"))]


# ---- its code


@pytest.mark.parametrize("seed", range(8))
def test_code_block_gives_the_advantages_of_the_library(seed):
    """In float64, at eps = 0, on random groups of which some have a lone tail."""
    draw = torch.Generator().manual_seed(seed)
    prompts, group_size, tokens, vocabulary = 5, 1 + seed % 4, 9, 7
    logits = torch.randn(prompts, group_size, tokens, vocabulary, generator=draw, dtype=torch.float64) * 2
    y = torch.randint(vocabulary, (prompts, group_size, tokens), generator=draw)
    R = torch.rand(prompts, group_size, generator=draw, dtype=torch.float64)
    lengths = torch.randint(1, tokens + 1, (prompts, group_size), generator=draw)
    alive = torch.arange(tokens) < lengths.unsqueeze(-1)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    page = {"torch": torch, "logits": logits, "y": y, "R": R, "alive": alive}
    exec(code, page)

    log_probs = logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    w = logit_gradient_proxy(log_probs, log_sum_squared_probs(logits)) * alive
    rollouts = RolloutGroups(R, lengths, w)
    assert rollouts.lone.any()
    torch.testing.assert_close(page["A"], advantages(rollouts, otb(rollouts, eps=0)), atol=1e-12, rtol=0)


# ---- what it points at


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files(page):
    missing = [target for target in links_of(page) if not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_links_to_a_heading_lead_to_one(page):
    lost = []
    for target, heading in HEADING_LINK.findall((ROOT / page).read_text(encoding="utf8")):
        if target.startswith("http"):
            continue
        text = ((ROOT / page).parent / target if target else ROOT / page).read_text(encoding="utf8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings}
        lost += [f"{target}#{heading}"] if heading not in slugs else []
    assert not lost


def test_files_that_the_front_page_names_are_there():
    named = re.findall(r"`([\w.-]+/[\w./-]*)`", README)
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_every_page_is_in_exactly_one_trail():
    trails = [part.splitlines()[0] for part in TRAILS.split("\n## ")[1:]]
    assert trails == ["Read the result", "Use it", "Change it"]
    linked = [(ROOT / "docs" / target).resolve() for target in links_of("docs/README.md")]
    pages = [(ROOT / page).resolve() for page in PAGES if page not in ("README.md", "docs/README.md")]
    pages = [
        page for page in pages if page.parent != ROOT / "study" or page.name == "README.md"
    ]  # which lists the others
    assert sorted(map(str, linked)) == sorted(map(str, pages))


def test_every_command_names_a_file_a_module_or_a_target_that_exists():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = COMMAND.findall(README)
    assert len(commands) > 8
    for command in commands:
        program, *arguments = command.split()
        if program == "make":
            assert arguments[0] in targets, command
        elif arguments[0] == "-m":
            path = ROOT / arguments[1].replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), command
        else:
            assert (ROOT / arguments[0]).exists(), command


def test_every_choice_that_a_command_makes_is_in_conf():
    groups = ("baseline", "task", "model", "experiment")
    for command in COMMAND.findall(README):
        for group, values in re.findall(rf"\b({'|'.join(groups)})=(\w[\w.,-]*)", command):
            for value in values.split(","):
                assert (ROOT / "conf" / group / f"{value}.yaml").exists(), command


# ---- what it says


def table_after(heading: str) -> list[list[str]]:
    """The cells of each row below the line of the README that begins so; the first is empty, as in `| a | b |`."""
    (table,) = [part for part in README.split("\n\n") if part.startswith(heading)]
    return [line.split("|") for line in table.splitlines()[2:]]


INSTEAD = {cells[1].split("`")[1]: cells[2:-1] for cells in table_after("| `baseline=`, N = 4 | noise / RLOO |")}


def test_table_of_noise_quotes_the_numbers_that_are_drawn():
    with open(NOISE, encoding="utf8") as file:
        measured = {(row["estimator"], int(row["group_size"])): row for row in csv.DictReader(file)}
    for name, cells in INSTEAD.items():
        drawn = [float(measured[name, 4][f"relative_noise{end}"]) for end in ("", "_low", "_high")]
        assert cells[0].strip() == "{:.2f} [{:.2f}, {:.2f}]".format(*drawn), name


@pytest.mark.parametrize(("column", "task"), list(enumerate(["arithmetic", "arithmetic_tools", "arithmetic_long"], 1)))
def test_table_of_accuracies_quotes_those_of_the_study(column, task):
    with open(VERDICTS, encoding="utf8") as file:
        rows = [row for row in csv.DictReader(file) if (row["claim"], row["task"]) == ("C3", task)]
    ends = {row["comparison"]: [float(row[end]) for end in ("estimate", "low", "high")] for row in rows if row["low"]}
    arms = {"energy_probe": "energy probe", "none": "no baseline", "otb_loo": "OTB (leave-one-out)", "otb": "OTB"}
    for name, cells in INSTEAD.items():
        found = ends.get(f"{arms.get(name, name.replace('_', ' '))}, N=4 minus RLOO, N=4")
        said = "{:.3f} [{:.3f}, {:.3f}]".format(*found) if found else "not run"
        assert cells[column].strip() == said, name


def test_table_of_baselines_says_of_each_what_it_declares():
    page = (ROOT / "docs" / "baselines.md").read_text(encoding="utf8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    said = {cells[1].strip(" `"): cells[3].strip() for cells in rows if cells[1].strip() != "`baseline=`"}
    declared = configured_baselines()
    assert set(said) <= set(declared)
    assert {name: word == "yes" for name, word in said.items()} == {name: is_unbiased(declared[name]) for name in said}
