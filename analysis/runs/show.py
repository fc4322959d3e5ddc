"""Prints a prompt group of a run, its tokens coloured: `python -m analysis.runs.show RUN`.

Options: --step S, --prompt P, --by energy. It reads the samples in rollouts/, which experiments/running/run_trainer.py
writes; needs neither torch nor the model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from analysis.runs.samples import energy, has_energy, read_samples, select_group
from analysis.runs.token_colours import background, largest
from otb.errors import RunError

COLOURED_BY = ("advantage", "energy")
TOOL_TOKEN = Style(dim=True, italic=True)  # the policy did not sample it
NOT_FINITE = Style(reverse=True)
MAX_PROMPT_CHARACTERS = 600


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 0 where a group was printed, 2 where there is none to print."""
    options = parse_arguments(arguments)
    console = Console(highlight=False)
    try:
        show_group(console, read_samples(options.run, options.step, failed=True), options.prompt, options.by)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.runs.show", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="step of the samples; default: the last one kept")
    parser.add_argument(
        "--prompt", type=int, help="which prompt group of the step, from 0; default: the first whose rewards differ"
    )
    parser.add_argument(
        "--by", choices=COLOURED_BY, default="advantage", help="what colours a token; default: advantage"
    )
    return parser.parse_args(arguments)


def show_group(console: Console, samples: pd.DataFrame, prompt: int | None, by: str) -> None:
    """Prints one prompt group: the prompt, a legend, then each rollout with its reward and coloured tokens.

    prompt: its number; None for the first group whose rewards differ: where all are equal every advantage is 0.
    """
    group = select_group(samples, prompt)
    values = [token_values(rollout, by) for _, rollout in group.iterrows()]
    limit = largest(values)
    prompts = samples["prompt"].nunique()
    console.print(
        f"[bold]step {group['step'].iloc[0]}, prompt {group['prompt'].iloc[0]} of {prompts} kept, {len(group)} rollouts"
    )
    text = group["prompt_text"].iloc[0].strip()
    cut = len(text) - MAX_PROMPT_CHARACTERS
    console.print(Text(text[:MAX_PROMPT_CHARACTERS] + (f" ... ({cut} more characters)" if cut > 0 else "")))
    console.print(legend(by, limit))
    for (_, rollout), row in zip(group.iterrows(), values, strict=True):
        console.print()
        console.print(Text(headline(rollout), style="bold"))
        console.print(coloured(rollout, row, by, limit))


def token_values(rollout: pd.Series, by: str) -> list[float]:
    """Returns one value per own token: its advantage, or the energy that it adds to the rollout's."""
    if by == "advantage":
        return [float(value) for value in rollout.advantages]
    return np.diff(energy(rollout), prepend=0.0).tolist()


def headline(rollout: pd.Series) -> str:
    """Returns the line above a rollout: its number, reward, length, range of advantages and energy."""
    own = len(rollout.advantages)
    reward = "unscored" if pd.isna(rollout.reward) else f"reward {rollout.reward:g}"
    facts = [f"rollout {rollout.rollout}", reward, f"{own} tokens"]
    if own:
        lowest, highest = min(rollout.advantages), max(rollout.advantages)
        facts.append(f"advantage {lowest:+.3f}" + (f" to {highest:+.3f}" if highest != lowest else ""))
    if own and has_energy(rollout):
        facts.append(f"energy {rollout.energies[-1]:.2f}")
    return "  ".join(facts)


def legend(by: str, limit: float) -> Text:
    """Returns the line that explains the colours."""
    text = Text("colour: ")
    if by == "advantage":
        text.append(f" -{limit:.2f} ", style_of(-limit, limit, by)).append(" less likely ")
        text.append(" 0 ").append(" more likely ").append(f" +{limit:.2f} ", style_of(limit, limit, by))
    else:
        text.append("energy of the token ").append(" 0 ").append(" to ")
        text.append(f" {limit:.2f} ", style_of(limit, limit, by))
    return text.append("  ").append("tool output", TOOL_TOKEN)


def coloured(rollout: pd.Series, values: list[float], by: str, limit: float) -> Text:
    """Returns the response, each own token on the colour of its value; control characters made visible."""
    text, remaining = Text(), iter(values)
    for token, own in zip(rollout.tokens, rollout.own, strict=True):
        text.append(visible(token), style_of(next(remaining), limit, by) if own else TOOL_TOKEN)
    return text


def visible(token: str) -> str:
    """Spells out control characters, which could move the cursor; line ends are kept behind a mark."""
    spelled = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in token)
    return spelled.replace("\n", "\u21b5\n")


def style_of(value: float, limit: float, by: str) -> Style:
    """Returns black text on the colour of a value; inverse video for a value that is not finite."""
    colour = background(value, limit, by)
    return NOT_FINITE if colour is None else Style(color="black", bgcolor=Color.from_rgb(*colour))


if __name__ == "__main__":
    raise SystemExit(main())
