"""The chat page as a new reader opens it, and sends something."""

from __future__ import annotations

from typing import Any

from browser_helpers import By, Keys, text_of, wait

# The page as a browser shows it that has never been here.
FORGET = """
const done = arguments[arguments.length - 1];
const request = indexedDB.deleteDatabase("llmstack");
request.onsuccess = request.onerror = () => done(true);
"""
SET = """
for (const [name, value] of Object.entries(arguments[0])) document.getElementById(name).value = value;
document.getElementById("settings").dispatchEvent(new Event("change"));
"""


def open_page(browser: Any, url: str) -> None:
    browser.get(f"{url}/version")  # of the same origin, and without a database of its own
    browser.execute_async_script(FORGET)
    browser.get_log("browser")
    browser.get(url)
    wait(browser, lambda driver: driver.find_elements(By.CSS_SELECTOR, "#model option"))
    wait(browser, lambda driver: driver.find_element(By.ID, "greeting").is_displayed())


def send(browser: Any, text: str, **settings: str) -> None:
    browser.execute_script(SET, settings)
    browser.find_element(By.ID, "prompt").send_keys(text, Keys.ENTER)


def send_and_wait(browser: Any, text: str, **settings: str) -> None:
    send(browser, text, **settings)
    wait(browser, lambda driver: text_of(driver, ".assistant .facts"))
