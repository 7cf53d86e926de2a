"""report.html in Debian's headless Chromium: light and dark, narrow and wide."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

from gate import page

LONG = "a_name_without_any_place_to_break_it_" * 8
RECORD = {
    "wheel": "gefen_cuda-0.1.0-py3-none-any.whl",
    "sha256": "ab" * 32,
    "profile": "cpu",
    "environment": "torch2.13.0",
    "result": "passed",
    "phases": [
        {"name": "audit", "status": "passed", "began": 0, "seconds": 0.0, "detail": ""},
        {"name": "tests", "status": "failed", "began": 0, "seconds": 3.0, "detail": LONG},
    ],
    "passed_tests": [f"single/test_a.py::{LONG}"],
    "uncovered": ["gpu: no GPU"],
    "facts": {"torch": "2.13.0", "platform": LONG},
}
FAILURE = {"where": LONG, "reason": LONG, "detail": f"{LONG}\n" * 300}
FAILED = {"profile": "gpu", "result": "failed", "failures": [FAILURE]}
CUT = {"profile": "multi-gpu", "result": "interrupted", "failures": [FAILURE]}

# WCAG 2.2, success criterion 1.4.3, of each element that holds text itself.
WORST_CONTRAST = """
const channel = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const numbers = text => text.match(/[\\d.]+/g).map(Number);
const behind = element => {
  for (let e = element; e; e = e.parentElement) {
    const found = numbers(getComputedStyle(e).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
let worst = 21;
for (const element of document.querySelectorAll('body *')) {
  if (![...element.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  const colours = [numbers(getComputedStyle(element).color), behind(element)];
  const light = colours.map(c => luminance(c.slice(0, 3).map(v => v / 255)));
  const [a, b] = light.sort((x, y) => y - x);
  worst = Math.min(worst, (a + 0.05) / (b + 0.05));
}
return worst;
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium, "no chromium: apt-get install chromium chromium-driver"
    assert driver, "no chromedriver: apt-get install chromium chromium-driver"
    options = ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = Chrome(options=options, service=ChromeService(driver))
    yield opened
    opened.quit()


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page(browser: Chrome, tmp_path: Path, scheme: str, width: int) -> None:
    for name, changes in {"passed": {}, "failed": FAILED, "cut": CUT}.items():
        folder = tmp_path / "runs" / "wheel" / name
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps({**RECORD, **changes}))
    html, _ = page.write(tmp_path)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", feature)
    browser.get(html.as_uri())
    for details in browser.find_elements("tag name", "details"):
        browser.execute_script("arguments[0].open = true", details)
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(WORST_CONTRAST) >= 4.5
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.get_log("browser") == []
