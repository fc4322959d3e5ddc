"""A real Chromium, driven by Selenium: pages open from disk, and what they ask of a network or complain of is kept."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_SECONDS, wait_for

FLAGS = (
    "headless=new",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
    "disable-dev-shm-usage",
    "hide-scrollbars",
    "force-color-profile=srgb",
    "host-resolver-rules=MAP * ~NOTFOUND",
)


def programs() -> tuple[str, str]:
    """Chromium and its driver. Skips the test where one is missing, and fails in CI."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (browser and driver) and not os.environ.get("CI"):
        pytest.skip("no chromium with its driver here: apt-get install chromium chromium-driver")
    assert browser and driver, "CI must have chromium and chromium-driver"
    return browser, driver


@contextmanager
def chromium(profile: Path) -> Iterator["Browser"]:
    """One browser for several tests; no host name resolves in it."""
    from selenium import webdriver

    browser, driver = programs()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    try:
        yield Browser(window)
    finally:
        window.quit()


class Browser:
    """What tests do with a page; `window` is Selenium's."""

    def __init__(self, window):
        self.window = window

    def open(self, page: Path, fragment: str = "", width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a page anew, in a window of this size, with or without the wish for dark pages."""
        self.window.get("about:blank")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.window.get(page.as_uri() + ("#" + fragment if fragment else ""))

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def js(self, script: str, *arguments):
        """What a script returns."""
        return self.window.execute_script(script, *arguments)

    def wait(self, script: str, *arguments) -> None:
        """Waits until a script returns something true."""
        wait_for(lambda: self.js(script, *arguments), every=0.02)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Whatever is done meanwhile must ask nothing of a network and leave the console empty."""
        self.complaints()
        self.requests()
        yield
        assert self.complaints() == [] and self.requests() == []

    def find(self, selector: str):
        return self.window.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of the elements that can be seen."""
        found = self.window.find_elements("css selector", selector)
        return [element.text for element in found if element.is_displayed()]

    def press(self, keys: str) -> None:
        """Types into whatever has the focus."""
        self.window.switch_to.active_element.send_keys(keys)

    def point(self, element) -> None:
        """Moves the pointer over an element."""
        from selenium.webdriver import ActionChains

        ActionChains(self.window).move_to_element(element).perform()

    def complaints(self) -> list[str]:
        """What the console said since the last call."""
        return [entry["message"] for entry in self.window.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses on a network that were asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.window.get_log("performance")]
        sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if one["request"]["url"].startswith(("http", "ws"))]


def faults(browser: Browser) -> list[tuple[str, list[str]]]:
    """What axe-core finds wrong with the page as it stands: rule and elements. Contrast must be among its checks."""
    from selenium_axe_python import Axe

    browser.window.set_script_timeout(PATIENCE_SECONDS)
    axe = Axe(browser.window)
    axe.inject()
    found = axe.run(context={"exclude": [[".picture > svg > *"]]})  # pictures: thousands of elements under one label
    assert "color-contrast" in {rule["id"] for rule in found["passes"]}
    return [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found["violations"]]
