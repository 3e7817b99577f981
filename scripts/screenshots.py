"""Pictures of the site's pages in headless Chromium, light and dark, as wide as desk and phone.

Run after `scripts/docs.sh`, with `.venv` active, as `python -m scripts.screenshots`; needs Debian's
`chromium` and `chromium-driver`. Writes build/screenshots/PAGE-SCHEME-WIDTH.png, and fails if a
page can be scrolled sideways or the browser's console has an error. `--page FILE` takes any page of
HTML, such as a report's.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SITE, OUT = ROOT / "build/site", ROOT / "build/screenshots"
PAGES = (
    "docs/index.html",
    "docs/guides/fsdp2.html",
    "docs/tutorials/ten_minutes.html",
    "docs/tutorials/pictures.html",
    "docs/reference/errors.html",
    "README.html",
)
WIDTHS = {"desk": (1280, 900), "phone": (390, 844)}
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium; ends the process with a message where there is none."""
    from selenium import webdriver  # noqa: PLC0415 - of the tests' packages
    from selenium.webdriver.chrome.service import Service  # noqa: PLC0415

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        sys.exit("error: no chromium or no chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        one = webdriver.Chrome(options=options, service=Service(driver))
        try:
            yield one
        finally:
            one.quit()


def take(one: Any, page: Path, name: str, *, scheme: str, width: str, whole: bool) -> list[str]:
    """Writes a picture of one page, and returns what is wrong with it."""
    across, down = WIDTHS[width]
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    one.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    metrics = {"width": across, "height": down, "deviceScaleFactor": 1, "mobile": width == "phone"}
    one.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    one.get(page.as_uri())
    wrong = [
        f"{entry['message']}" for entry in one.get_log("browser") if entry["level"] == "SEVERE"
    ]
    wide = one.execute_script("return document.documentElement.scrollWidth")
    if wide > across:
        wrong.append(f"{wide} pixels wide on a screen of {across}")
    if whole:
        high = min(one.execute_script("return document.documentElement.scrollHeight"), 12000)
        one.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics | {"height": high})
    OUT.mkdir(parents=True, exist_ok=True)
    one.save_screenshot(str(OUT / f"{name}-{scheme}-{width}.png"))
    return [f"{name}, {scheme}, {width}: {text}" for text in wrong]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--page", type=Path, action="append", help="another page, as a file of HTML"
    )
    parser.add_argument("--whole", action="store_true", help="the whole page, not the first screen")
    args = parser.parse_args()
    pages = args.page or [SITE / name for name in PAGES]
    for page in pages:
        if not page.exists():
            sys.exit(f"error: {page} is not there; scripts/docs.sh builds the site")
    wrong = []
    with browser() as one:
        for page in pages:
            name = page.stem if page.stem != "index" else "front"
            for scheme in ("light", "dark"):
                for width in WIDTHS:
                    wrong += take(
                        one, page.resolve(), name, scheme=scheme, width=width, whole=args.whole
                    )
    print(f"written: {4 * len(pages)} pictures in {OUT}")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
