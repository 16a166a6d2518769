"""The microphone of the chat page in a real browser, and sound files: text while it comes, kept with the chat.

With the trained models of `LLMSTACK_SPEECH` (see test_trained_speech.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_helpers import By, open_browser, set_scheme, text_of, violations, wait
from chat_page_helpers import FORGET

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
FOLDER = Path(os.environ.get("LLMSTACK_SPEECH", "speech-models"))
SOUND = FOLDER / "speech" / "jfk.wav"
MODEL = FOLDER / "whisper-tiny.en"
if not (MODEL / "config.json").is_file() or not SOUND.is_file():
    pytest.skip(f"needs {MODEL} and {SOUND}: set LLMSTACK_SPEECH", allow_module_level=True)
KEY = "s3cret"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    flags = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")
    with open_browser(*flags, f"--use-file-for-fake-audio-capture={SOUND.resolve()}%noloop") as driver:
        yield driver


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(str(MODEL), "--dtype", "float32", "--served-model-name", "whisper") as one:
        yield one


@pytest.fixture(scope="module")
def locked_server(serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(str(MODEL), "--dtype", "float32", "--api-key", KEY) as one:
        yield one


def words(text: str) -> str:
    return " ".join(re.sub(r"[^a-z ]", " ", text.lower()).split())


def open_page(browser: Any, url: str) -> None:
    browser.get(f"{url}/ping")  # of the same origin, and without a database of its own
    browser.execute_async_script(FORGET)
    browser.get_log("browser")
    browser.get(url)


def answer(browser: Any) -> str:
    return words(text_of(browser, ".message.assistant .text, .message.assistant .body, .message.assistant"))


def test_what_is_said_is_written_while_it_is_said(browser: Any, server: Any) -> None:
    open_page(browser, server.url)
    record = wait(browser, lambda driver: driver.find_element(By.ID, "record"))
    wait(browser, lambda _: record.is_displayed())
    assert not browser.find_element(By.ID, "prompt").is_displayed()
    assert not browser.find_element(By.ID, "send").is_displayed()
    record.click()
    stop = browser.find_element(By.ID, "stop-recording")
    wait(browser, lambda driver: "fellow" in answer(driver))
    assert stop.is_displayed()
    wait(browser, lambda driver: "country" in answer(driver))
    stop.click()
    wait(browser, lambda driver: driver.find_element(By.ID, "record").is_displayed())
    shown = browser.execute_script("return state.chat.messages.at(-1).content")
    assert "ask not what your country can do for you" in words(shown)
    browser.refresh()
    wait(browser, lambda driver: "fellow american" in answer(driver))
    found = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not [entry for entry in found if "favicon.ico" not in entry["message"]]  # of /ping, which is no page


def test_a_sound_file_becomes_text(browser: Any, server: Any) -> None:
    open_page(browser, server.url)
    wait(browser, lambda driver: driver.find_element(By.ID, "add-sound").is_displayed())
    browser.find_element(By.ID, "sound-file").send_keys(str(SOUND.resolve()))
    wait(browser, lambda driver: "do for your country" in answer(driver))
    wait(browser, lambda driver: driver.find_element(By.ID, "record").is_displayed())
    assert "jfk.wav" in text_of(browser, ".message.user")


def test_a_server_with_keys_takes_that_of_the_page(browser: Any, locked_server: Any) -> None:
    open_page(browser, locked_server.url)
    wait(browser, lambda driver: driver.find_element(By.ID, "key").is_displayed())
    browser.find_element(By.ID, "key").send_keys(KEY)
    browser.find_element(By.CSS_SELECTOR, "#key-form .primary").click()
    wait(browser, lambda driver: driver.find_element(By.ID, "record").is_displayed())
    browser.find_element(By.ID, "record").click()
    wait(browser, lambda driver: "fellow" in answer(driver))
    browser.find_element(By.ID, "stop-recording").click()
    wait(browser, lambda driver: driver.find_element(By.ID, "record").is_displayed())


def test_without_websockets_speech_is_a_file(browser: Any, server: Any) -> None:
    open_page(browser, server.url)
    wait(browser, lambda driver: driver.find_element(By.ID, "record").is_displayed())
    browser.execute_script("for (const model of models.list) model.speech = { realtime: false }")
    browser.find_element(By.ID, "record").click()
    wait(browser, lambda driver: "Listening" in text_of(driver, "#status"))
    browser.execute_async_script("setTimeout(arguments[arguments.length - 1], 5000)")
    browser.find_element(By.ID, "stop-recording").click()
    wait(browser, lambda driver: "fellow american" in answer(driver))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, server: Any, scheme: str) -> None:
    open_page(browser, server.url)
    set_scheme(browser, scheme)
    wait(browser, lambda driver: driver.find_element(By.ID, "add-sound").is_displayed())
    assert violations(browser) == []
    browser.find_element(By.ID, "sound-file").send_keys(str(SOUND.resolve()))
    wait(browser, lambda driver: "do for your country" in answer(driver))
    wait(browser, lambda driver: driver.find_element(By.ID, "record").is_displayed())
    assert violations(browser) == []
