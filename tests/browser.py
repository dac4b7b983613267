"""Headless Chromium for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# The headless shell has no windows, tabs or address bar: a page takes a third of the CPU time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Chromium reads the last list only, so this one has Playwright's own entries, too.
DISABLED_FEATURES = (
    # Pages of the address bar: two more for every page that is opened.
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "WebUIOmniboxFullPopup",
    "AimEnabled",
    "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "LensOverlay",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
)
FLAGS = (
    "--no-sandbox",  # CI runs as root, and the only pages opened are our own
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--mute-audio",
    # Draw without a graphics API: emulating one on the CPU takes more CPU time than the pages' own code.
    "--disable-gpu",
    "--disable-software-rasterizer",
    # A fake microphone that beeps, without a permission prompt.
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    f"--disable-features={','.join(DISABLED_FEATURES)}",
)


def executable() -> str | None:
    """Return the path of the browser: CHROMIUM, or the first of NAMES on the PATH."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator["Browser"]:
    """Open a browser. Skips the test where there is none; scripts/browser tries to install one."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make install")
    path = executable()
    if path is None:
        pytest.skip("needs a Chromium: run scripts/browser as root, or set CHROMIUM to one")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()
