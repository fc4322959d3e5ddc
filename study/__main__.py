"""python -m study report: rebuilds study from its csv files. `rates` writes study/rates.yaml."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from otb.errors import RunError
from study.pages import write
from study.rates import write_rates

STUDY = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 2 for what is refused."""
    parser = argparse.ArgumentParser(prog="python -m study", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["report", "rates"])
    parser.add_argument("--folder", type=Path, default=STUDY, help="of the study; holds rows/")
    options = parser.parse_args(arguments)
    try:
        if options.what == "rates":
            files = sorted((options.folder / "rows").glob("claim_rates*.csv"))
            if not files:
                raise RunError(f"{options.folder}/rows holds no claim_rates*.csv. Run the search first.")
            print(write_rates(files).to_string(index=False))
        else:
            print("\n".join(map(str, write(options.folder))))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
