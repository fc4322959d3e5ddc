"""Prints a prompt group of a run, its tokens coloured: `python -m otb.show RUN [--step S] [--prompt P] [--by energy]`.

Reads the samples in rollouts/, which experiments/run_trainer.py writes; needs neither torch nor the model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from otb.errors import RunError
from otb.records import RunDirectory, sample_step

COLOURS = ("advantage", "energy")
RED, GREEN, BLUE = (200, 30, 30), (0, 130, 60), (30, 80, 200)
OTHER = Style(dim=True, italic=True)  # tool tokens: the policy did not sample them
MAX_PROMPT_CHARACTERS = 600


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 shown, 2 where there is nothing to show."""
    options = parse_arguments(arguments)
    console = Console(highlight=False)
    try:
        samples = read_samples(RunDirectory(options.run), options.step)
        show_group(console, samples, options.prompt, options.by)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m otb.show", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="step of the samples; default: the last one kept")
    parser.add_argument("--prompt", type=int, default=0, help="which prompt group of the step, from 0; default: 0")
    parser.add_argument("--by", choices=COLOURS, default="advantage", help="what colours a token; default: advantage")
    return parser.parse_args(arguments)


def read_samples(directory: RunDirectory, step: int | None) -> pd.DataFrame:
    """The kept rollouts of a step, of the last kept one for None. Raises RunError, with the steps there are."""
    if not directory.config_file.exists():
        raise RunError(f"{directory.path} is no run directory: it has no config.yaml. Try {_runs_nearby(directory)}.")
    files: dict[int, list[Path]] = {}
    for file in sorted(directory.rollouts.glob("*.parquet")):
        files.setdefault(sample_step(file), []).append(file)
    if not files:
        raise RunError(
            f"{directory.path} keeps no rollouts, or has not come to the first step that does. Try rollouts.every=20."
        )
    chosen = max(files) if step is None else step
    if chosen not in files:
        raise RunError(f"step={step} has no samples in {directory.path}; kept: {', '.join(map(str, sorted(files)))}.")
    return pd.concat([pd.read_parquet(file) for file in files[chosen]], ignore_index=True)


def _runs_nearby(directory: RunDirectory) -> str:
    found = sorted(config.parent for config in directory.path.glob("**/config.yaml"))
    return f"{found[0]}" if found else "the directory that the run printed at its end"


def show_group(console: Console, samples: pd.DataFrame, prompt: int, by: str) -> None:
    """Prints one prompt group: the prompt, a legend, then each rollout with its reward and coloured tokens."""
    prompts = sorted(samples["prompt"].unique())
    if prompt not in prompts:
        raise RunError(f"prompt={prompt} is not among the kept prompt groups; kept: {', '.join(map(str, prompts))}.")
    group = samples[samples["prompt"] == prompt].sort_values("rollout")
    if by == "energy" and group["energies"].isna().any():
        raise RunError("--by energy: this run measured no energies. Use a baseline with energy, or log_energy=true.")
    values = [token_values(rollout, by) for rollout in group.itertuples()]
    largest = max((abs(value) for row in values for value in row), default=0.0)

    console.print(f"[bold]step {group['step'].iloc[0]}, prompt {prompt} of {len(prompts)} kept, {len(group)} rollouts")
    text = group["prompt_text"].iloc[0].strip()
    cut = len(text) - MAX_PROMPT_CHARACTERS
    console.print(Text(text[:MAX_PROMPT_CHARACTERS] + (f" ... ({cut} more characters)" if cut > 0 else "")))
    console.print(legend(by, largest))
    for rollout, row in zip(group.itertuples(), values, strict=True):
        console.print()
        console.print(Text(headline(rollout), style="bold"))
        console.print(coloured(rollout, row, by, largest))


def token_values(rollout, by: str) -> list[float]:
    """One value per own token: its advantage, or the energy that it adds to the rollout's."""
    if by == "advantage":
        return [float(value) for value in rollout.advantages]
    energies = [float(value) for value in rollout.energies]
    return [energy - before for energy, before in zip(energies, [0.0, *energies], strict=False)]


def headline(rollout) -> str:
    own = len(rollout.advantages)
    reward = "unscored" if pd.isna(rollout.reward) else f"reward {rollout.reward:g}"
    facts = [f"rollout {rollout.rollout}", reward, f"{own} tokens"]
    if own:
        lowest, highest = min(rollout.advantages), max(rollout.advantages)
        facts.append(f"advantage {lowest:+.3f}" + (f" to {highest:+.3f}" if highest != lowest else ""))
    if rollout.energies is not None and own:
        facts.append(f"energy {rollout.energies[-1]:.2f}")
    return "  ".join(facts)


def legend(by: str, largest: float) -> Text:
    text = Text("colour: ")
    if by == "advantage":
        text.append(f" -{largest:.2f} ", shade(-1.0, by)).append(" less likely ")
        text.append(" 0 ").append(" more likely ").append(f" +{largest:.2f} ", shade(1.0, by))
    else:
        text.append("energy of the token ").append(" 0 ").append(" to ").append(f" {largest:.2f} ", shade(1.0, by))
    return text.append("  ").append("tool output", OTHER)


def coloured(rollout, values: list[float], by: str, largest: float) -> Text:
    """The response, each own token on the colour of its value; control characters made visible."""
    text, remaining = Text(), iter(values)
    for token, own in zip(rollout.tokens, rollout.own, strict=True):
        style = shade(next(remaining) / largest if largest else 0.0, by) if own else OTHER
        text.append(visible(token), style)
    return text


def visible(token: str) -> str:
    """Line ends are kept behind a mark; other control characters, which could move the cursor, are spelled out."""
    spelled = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in token)
    return spelled.replace("\n", "\u21b5\n")


def shade(share: float, by: str) -> Style:
    """The background of a value, share in [-1, 1] of the largest: white is 0. Not finite: inverse video."""
    if not -1.0 <= share <= 1.0:
        return Style(reverse=True)
    colour = BLUE if by == "energy" else GREEN if share > 0 else RED
    red, green, blue = (round(255 + (channel - 255) * abs(share)) for channel in colour)
    text = "white" if abs(share) > 0.6 else "black"
    return Style(color=text, bgcolor=Color.from_rgb(red, green, blue))


if __name__ == "__main__":
    raise SystemExit(main())
