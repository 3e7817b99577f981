"""The page in a real browser: its key, text that streams and ends, and the stop button."""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from examples.llama_serving.guard import Access
from examples.llama_serving.programs import Programs
from examples.llama_serving.tests.test_app import start
from examples.llama_serving.tests.tiny import LENGTH, wait_idle

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--window-size=1000,760",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM.exists() and DRIVER),
        reason="needs a browser: apt-get install chromium chromium-driver",
    ),
]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    assert DRIVER is not None
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def test_a_prompt_is_continued_and_stopped(
    programs: Programs, tokenizer: Any, browser: webdriver.Chrome
) -> None:
    server = start(programs, tokenizer, access=Access(api_key="key"))

    def element(name: str) -> Any:
        return browser.find_element(By.ID, name)

    def write(name: str, text: str) -> None:
        element(name).clear()
        element(name).send_keys(text)

    try:
        browser.get(server.url)
        until(lambda: element("model").text == "needs an API key")
        write("key", "key\t")
        until(lambda: element("model").text == f"tiny, up to {LENGTH} tokens")
        asked = {"prompt": "the cat sat", "max_tokens": 40, "temperature": 0}
        with server.client(Authorization="Bearer key") as client:
            wanted = client.post("/v1/completions", json=asked).json()["choices"][0]["text"]
        for name, value in asked.items():
            write(name, str(value))
        # What the page shows after each piece of text.
        browser.execute_script(
            "window.seen = []; new MutationObserver(() => window.seen.push("
            "document.getElementById('text').textContent.length))"
            ".observe(document.getElementById('text'), {childList: true});"
        )
        element("send").click()
        until(lambda: "·" in element("status").text)
        shown = "return document.getElementById('text').textContent"
        assert browser.execute_script(shown) == wanted
        assert len(set(browser.execute_script("return window.seen"))) > 5  # it grew in pieces
        assert "reached the most tokens" in element("status").text
        assert element("asked").text == "the cat sat"

        # A refusal is shown.
        write("stop", "")
        write("prompt", "a b " * 60)
        element("send").click()
        until(lambda: "Shorten it" in element("status").text)
        assert element("status").get_attribute("class") == "bad"

        # The stop button ends the request on the server too.
        decode = server.engine._programs.decode
        server.engine._programs.decode = lambda: (time.sleep(0.05), decode())[1]  # type: ignore
        write("prompt", "the dog")
        write("max_tokens", "60")
        element("mode").send_keys("Chat")
        element("send").click()
        until(lambda: bool(browser.execute_script(shown)))
        element("halt").click()
        until(lambda: element("status").text == "Stopped")
        del server.engine._programs.decode
        wait_idle(server.engine)
        assert server.measures.value("llama_requests_total", outcome="cancelled") == 1
        severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        # The key was missing, then the text too long; the address may have any digits.
        assert ["status of 401" in one["message"] for one in severe] == [True, False]
        assert "400" in severe[1]["message"]  # the refusal
    finally:
        server.end()
