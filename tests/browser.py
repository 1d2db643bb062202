"""A page as a person sees it: rendered by the machine's own Chromium."""

import shutil
from pathlib import Path

import pytest


def page_text(url: str, *expected: str, screenshot: Path | None = None, seconds: float = 90) -> str:
    """The visible text of the page at `url` once it shows every text `expected`; skips without Chromium.

    Raises AssertionError with the text seen instead after `seconds`.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium; on Debian: apt-get install chromium")
    from playwright.sync_api import TimeoutError as Late
    from playwright.sync_api import expect, sync_playwright

    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=quiet)
        page = browser.new_page(viewport={"width": 1600, "height": 1400})
        try:
            page.goto(url, wait_until="domcontentloaded", timeout=seconds * 1000)
            for text in expected:
                expect(page.get_by_text(text).first).to_be_visible(timeout=seconds * 1000)
        except (AssertionError, Late) as error:
            raise AssertionError(f"{url} did not show {expected}: {page.inner_text('body')[:3000]}") from error
        finally:
            if screenshot is not None:
                page.screenshot(path=screenshot)
        return page.inner_text("body")
