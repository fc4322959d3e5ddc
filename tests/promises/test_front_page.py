"""The README: its code is the library's, its links, commands and folders exist, its numbers are those drawn."""

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
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "slurm/README.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
NOISE = ROOT / "docs" / "figures" / "noise.csv"
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
COMMAND = re.compile(r"(?:^    |`)((?:python|make) [^`\n]*)", re.MULTILINE)
NUMBER = re.compile(r"\d\.\d\d")


def links_of(page: str) -> list[str]:
    """The relative links of a Markdown page."""
    targets = LINK.findall((ROOT / page).read_text(encoding="utf8"))
    return [target for target in targets if not target.startswith(("http", "mailto:"))]


def block_after(heading: str) -> list[str]:
    """The lines of the indented block that follows a heading of the README."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line[4:] for line in section.splitlines() if line.startswith("    ")]


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
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "cumsum" in block]
    page = {"torch": torch, "logits": logits, "y": y, "R": R, "alive": alive}
    exec(code, page)

    log_probs = logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    w = logit_gradient_proxy(log_probs, log_sum_squared_probs(logits)) * alive
    rollouts = RolloutGroups(R, lengths, w)
    assert rollouts.lone.any()
    torch.testing.assert_close(page["A"], advantages(rollouts, otb(rollouts, eps=0)), atol=1e-12, rtol=0)


def test_script_trains_as_it_stands_on_the_page(policy, tmp_path):
    """One step, with a small policy in the place of the one on the hub."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "OTBTrainer(" in block]
    on_a_cpu = f'"{tmp_path}", max_steps=1, use_cpu=True, bf16=False, report_to="none", save_strategy="no", '
    for typed, small in (
        ('"Qwen/Qwen2.5-0.5B-Instruct"', f'"{policy}"'),
        ('"out",', on_a_cpu + "logging_steps=1, gradient_checkpointing=False,"),
        ("max_completion_length=64", "max_completion_length=8"),
    ):
        assert code.count(typed) == 1
        code = code.replace(typed, small)
    page = {}
    exec(code, page)
    assert page["trainer"].state.global_step == 1
    says = [[{"role": "assistant", "content": text}] for text in (" 42\n", "41", "42")]
    assert page["reward"](says, answer=["42", "42", ""], prompts=[]) == [1.0, 0.0, None]


# ---- what it points at


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files(page):
    missing = [target for target in links_of(page) if not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing


def test_files_that_the_front_page_names_are_there():
    named = re.findall(r"`([\w.-]+/[\w./-]*)`", README)
    assert named and not [name for name in named if not (ROOT / name).exists()]


def test_every_page_of_docs_is_linked_from_the_front_page_or_from_a_page_that_is():
    linked = {(ROOT / target).resolve() for target in links_of("README.md")}
    for page in [page for page in linked if page.suffix == ".md" and page.exists()]:
        linked |= {page.parent.joinpath(target).resolve() for target in links_of(str(page.relative_to(ROOT)))}
    unlinked = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path not in linked]
    assert not unlinked, f"Add a link to {', '.join(unlinked)} to the table at the end of README.md."


def test_tree_lists_every_top_level_folder_and_nothing_else():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {name.split("/")[0] for name in tracked.splitlines() if "/" in name}
    listed = [line.split("/")[0] for line in block_after("Layout") if line[0] != " "]
    assert sorted(listed) == sorted(folder for folder in folders if not folder.startswith("."))


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


def noise_rows() -> list[tuple[str, list[str]]]:
    """(estimator, the numbers for N = 4 and for N = 32 with their bounds) per name in the table of the README."""
    rows = table_after("| `baseline=` | noise / RLOO")
    return [(name, NUMBER.findall(cell[2] + cell[3])) for cell in rows for name in re.findall(r"`(\w+)`", cell[1])]


def test_table_of_noise_quotes_the_numbers_that_are_drawn():
    if not NOISE.exists():
        pytest.skip("docs/figures/noise.csv is not there")
    with open(NOISE, encoding="utf8") as file:
        measured = {(row["estimator"], int(row["group_size"])): row for row in csv.DictReader(file)}
    assert len(noise_rows()) == 8
    for name, quoted in noise_rows():
        ends = ("", "_low", "_high") if len(quoted) == 6 else ("",)
        drawn = [f"{float(measured[name, size][f'relative_noise{end}']):.2f}" for size in (4, 32) for end in ends]
        assert quoted == drawn, name


@pytest.mark.parametrize(("column", "task"), list(enumerate(["arithmetic", "arithmetic_tools", "arithmetic_long"], 2)))
def test_table_of_accuracies_quotes_those_of_the_study(column, task):
    study = (ROOT / "docs" / "study" / "README.md").read_text(encoding="utf8")
    section = study.split(f"\n## C3 on `{task}`\n")[1].split("\n## ")[0]
    quoted = {cells[1].strip(" `"): cells[column].strip() for cells in table_after("| `baseline=` | `arithmetic` |")}
    arms = {"energy_probe": "energy probe", "none": "no baseline", "sequence_energy": "sequence energy", "otb": "OTB"}
    assert set(quoted) == set(arms)
    for name, arm in arms.items():
        found = re.findall(rf"^\| {arm}, N=4 minus RLOO, N=4 \| ([^|]+) \|", section, re.MULTILINE)
        assert [quoted[name]] == (found or ["not run"]), arm


def test_table_of_baselines_says_of_each_what_it_declares():
    page = (ROOT / "docs" / "baselines.md").read_text(encoding="utf8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    said = {cells[1].strip(" `"): cells[3].strip() for cells in rows if cells[1].strip() != "`baseline=`"}
    declared = configured_baselines()
    assert set(said) <= set(declared)
    assert {name: word == "yes" for name, word in said.items()} == {name: is_unbiased(declared[name]) for name in said}
