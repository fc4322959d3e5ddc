"""Takes pictures of a report or a page of rollouts: `python -m tests.support.screenshots PAGE FOLDER [FRAGMENT]`.

The docs use 1280-light.png of a report of tests/data/runs, and two pictures of pages of rollouts.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.support.browser import chromium
from tests.support.rollout_runs import SETTLED

WIDTHS = {1280: 1080, 800: 1100, 390: 844}  # pixels: heights


def screenshots(page: Path, folder: Path, fragment: str = "") -> None:
    """Writes a picture per width and colour scheme, in 256 colours: half the size, without a visible difference."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        for width, height in WIDTHS.items():
            for dark in (False, True):
                browser.open(page.resolve(), fragment, width, height, dark)
                if browser.js("return typeof views !== 'undefined'"):  # a page of rollouts fills itself
                    browser.wait(SETTLED)
                picture = Image.open(io.BytesIO(browser.window.get_screenshot_as_png())).convert("RGB")
                file = folder / f"{width}-{'dark' if dark else 'light'}.png"
                picture.quantize(256, kmeans=2, dither=Image.Dither.NONE).save(file, optimize=True)
        for complaint in browser.complaints():
            print(complaint)


if __name__ == "__main__":
    screenshots(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
