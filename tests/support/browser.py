"""Drives a real Chromium with Selenium: opens pages from disk, and records their network requests and complaints."""

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
    """Returns Chromium and its driver. If one is missing, the test is skipped, and in CI it fails."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (browser and driver) and not os.environ.get("CI"):
        pytest.skip("no chromium with its driver here: apt-get install chromium chromium-driver")
    assert browser and driver, "CI must have chromium and chromium-driver"
    return browser, driver


@contextmanager
def chromium(profile: Path) -> Iterator["Browser"]:
    """Starts one browser for several tests; it resolves no host name."""
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
    """Lets tests use a page; `window` is Selenium's."""

    def __init__(self, window):
        self.window = window

    def open(self, page: Path, fragment: str = "", width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Loads a page in a window of this size, with or without a preference for dark pages."""
        self.window.get("about:blank")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.window.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.window.get(page.as_uri() + ("#" + fragment if fragment else ""))

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def js(self, script: str, *arguments):
        """Returns the value of a script."""
        return self.window.execute_script(script, *arguments)

    def wait(self, script: str, *arguments) -> None:
        """Waits until a script returns something true."""
        wait_for(lambda: self.js(script, *arguments), every=0.02)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Requires that the block sends no network request and leaves the console empty."""
        self.complaints()
        self.requests()
        yield
        assert self.complaints() == [] and self.requests() == []

    def find(self, selector: str):
        return self.window.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of the visible elements."""
        found = self.window.find_elements("css selector", selector)
        return [element.text for element in found if element.is_displayed()]

    def press(self, keys: str) -> None:
        """Types into the focused element."""
        self.window.switch_to.active_element.send_keys(keys)

    def point(self, element) -> None:
        """Moves the pointer over an element."""
        from selenium.webdriver import ActionChains

        ActionChains(self.window).move_to_element(element).perform()

    def complaints(self) -> list[str]:
        """Returns the console's messages since the last call."""
        return [entry["message"] for entry in self.window.get_log("browser")]

    def requests(self) -> list[str]:
        """Returns the network addresses requested since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.window.get_log("performance")]
        sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if one["request"]["url"].startswith(("http", "ws"))]


def faults(browser: Browser) -> list[tuple[str, list[str]]]:
    """Returns what axe-core finds wrong with the current page, rule and elements; contrast must be checked."""
    from selenium_axe_python import Axe

    browser.window.set_script_timeout(PATIENCE_SECONDS)
    axe = Axe(browser.window)
    axe.inject()
    found = axe.run(context={"exclude": [[".picture > svg > *"]]})  # pictures: thousands of elements under one label
    assert "color-contrast" in {rule["id"] for rule in found["passes"]}
    return [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found["violations"]]
