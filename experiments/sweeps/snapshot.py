"""A copy of the code lies beside a sweep: its queued runs use it, whatever is edited meanwhile. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from experiments.running.environment import ROOT, SNAPSHOT_FACTS, commit, git, working_tree_diff

FOLDERS = ("analysis", "benchmarks", "conf", "experiments", "hydra_plugins", "otb", "slurm", "tests")
BESIDE_PYTHON = (".yaml", ".jinja", ".mplstyle")  # code too, in FOLDERS; elsewhere a yaml may be a run's
LARGEST_BYTES = 1 << 20


def take_snapshot(folder: Path) -> Path:
    """Copies the code into `folder`, under a name that follows from its content. Returns the copy's folder."""
    contents = {name: (ROOT / name).read_bytes() for name in code_files()}
    facts = {"commit": commit(), "diff": working_tree_diff()}
    digest = hashlib.sha256(json.dumps(facts).encode())
    for name, content in contents.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    copy = folder / digest.hexdigest()[:16]
    if copy.exists():
        return copy
    aside = folder / f".{copy.name}.{os.getpid()}"
    for name, content in contents.items():
        file = aside / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        shutil.copymode(ROOT / name, file)
    (aside / SNAPSHOT_FACTS).write_text(json.dumps(facts), encoding="utf8")
    try:
        os.rename(aside, copy)
    except OSError:  # another process took the same one
        shutil.rmtree(aside)
    return copy


def code_files() -> list[str]:
    """Returns the project's files of code: those that git knows and new ones, or all where there is no git."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    if "experiments/run.py" not in names:
        names = [str(path.relative_to(ROOT)) for top in FOLDERS for path in (ROOT / top).rglob("*")]
    return sorted(name for name in names if is_code(Path(name)))


def is_code(name: Path) -> bool:
    """Tells whether a file of the project belongs into a copy of its code."""
    if not name.parts or any(part.startswith(".") for part in name.parts) or name.parts[:2] == ("tests", "data"):
        return False
    if name.suffix != ".py" and not (name.suffix in BESIDE_PYTHON and name.parts[0] in FOLDERS):
        return False
    return (ROOT / name).is_file() and (ROOT / name).stat().st_size <= LARGEST_BYTES
