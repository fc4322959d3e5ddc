"""Pictures of a report or a page of rollouts: `python -m tests.support.screenshots PAGE FOLDER [FRAGMENT]`."""

import sys
import tempfile
from pathlib import Path

from tests.support.browser import chromium
from tests.support.rollout_runs import SETTLED

WIDTHS = {1280: 1080, 800: 1100, 390: 844}  # pixels: heights


def screenshots(page: Path, folder: Path, fragment: str = "") -> None:
    """Writes a picture per width and scheme."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        for width, height in WIDTHS.items():
            for dark in (False, True):
                browser.open(page.resolve(), fragment, width, height, dark)
                if browser.js("return typeof views !== 'undefined'"):  # a page of rollouts fills itself
                    browser.wait(SETTLED)
                browser.window.save_screenshot(str(folder / f"{width}-{'dark' if dark else 'light'}.png"))
        for complaint in browser.complaints():
            print(complaint)


if __name__ == "__main__":
    screenshots(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
