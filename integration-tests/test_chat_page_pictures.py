"""Pictures and sounds on the chat page in a real browser: by button, drop and paste, in chats, within limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import picture_model
import pytest
import sound_model
from browser_helpers import By, Keys, open_browser, set_scheme, text_of, violations, wait
from chat_page_helpers import open_page

pytestmark = pytest.mark.full  # a browser takes seconds to start

# Gives files to the page as a drop or a paste does: the event with its files, which a test cannot take off a desktop.
GIVE = """
const [kind, files] = arguments;
const transfer = new DataTransfer();
for (const [name, type, text] of files) {
  transfer.items.add(new File([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], name, { type }));
}
const options = { bubbles: true, cancelable: true };
const event = kind === "drop" ? new DragEvent("drop", { ...options, dataTransfer: transfer })
  : new ClipboardEvent("paste", { ...options, clipboardData: transfer });
return !document.getElementById("prompt").dispatchEvent(event);
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("pictures") / "model"
    picture_model.save_picture_model(folder)
    flags = ("--dtype", "float32", "--limit-mm-per-prompt", '{"image": 2}', "--max-image-pixels", "20000")
    with serve(str(folder), *flags) as one:
        yield one


def file_of(seed: int, width: int = 70, name: str = "cat.png") -> tuple[str, str, str]:
    url = picture_model.data_url(picture_model.picture(seed, width))
    return name, "image/png", url.partition(",")[2]


def give(browser: Any, kind: str, *files: tuple[str, str, str]) -> None:
    assert browser.execute_script(GIVE, kind, files)  # the page takes the event: the browser does not


def tray(browser: Any) -> list[str]:
    return list(browser.execute_script("return [...document.querySelectorAll('#tray img')].map(({ alt }) => alt)"))


def drawn_width(browser: Any, selector: str) -> list[int]:
    script = "return [...document.querySelectorAll(arguments[0])].map(({ naturalWidth }) => naturalWidth)"
    return list(browser.execute_script(script, selector))


def test_pictures_are_sent_shown_edited_and_kept(browser: Any, server: Any, tmp_path: Path) -> None:
    open_page(browser, server.url)
    path = tmp_path / "dog.png"
    picture_model.picture(1).save(path)
    assert browser.find_element(By.ID, "add-files").is_displayed()
    browser.find_element(By.ID, "files").send_keys(str(path))
    wait(browser, lambda driver: tray(driver) == ["dog.png"])
    give(browser, "paste", file_of(2))
    wait(browser, lambda driver: tray(driver) == ["dog.png", "cat.png"])
    assert text_of(browser, "#tray p") == "2 of 2 pictures; each at most 26.2 MB and 0 megapixels"
    browser.refresh()
    wait(browser, lambda driver: tray(driver) == ["dog.png", "cat.png"])  # a draft is kept with its pictures
    browser.find_element(By.CSS_SELECTOR, "#tray button[aria-label='Remove dog.png']").click()
    wait(browser, lambda driver: tray(driver) == ["cat.png"])
    browser.execute_script("document.getElementById('max_tokens').value = '5'")
    browser.execute_script("document.getElementById('temperature').value = '0'")
    browser.find_element(By.ID, "prompt").send_keys(picture_model.QUESTION, Keys.ENTER)
    wait(browser, lambda driver: text_of(driver, ".assistant .facts"))
    assert tray(browser) == []
    assert drawn_width(browser, ".message.user img") == [70]
    messages: Any = [{"role": "user", "content": picture_model.parts((2,))}]
    model = text_of(browser, "#model option")
    expected = server.client.chat.completions.create(
        model=server.client.models.list().data[0].id, messages=messages, temperature=0, max_tokens=5
    )
    assert model in server.client.models.list().data[0].id
    shown = browser.execute_script("return state.chat.messages.at(-1).content")
    assert shown == expected.choices[0].message.content
    browser.refresh()
    wait(browser, lambda driver: drawn_width(driver, ".message.user img") == [70])
    browser.find_element(By.ID, "prompt").send_keys(Keys.ARROW_UP)
    wait(browser, lambda driver: tray(driver) == ["cat.png"])
    assert browser.find_element(By.ID, "prompt").get_attribute("value") == picture_model.QUESTION
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_what_the_server_would_refuse_is_refused_before(browser: Any, server: Any) -> None:
    open_page(browser, server.url)
    give(browser, "drop", ("a.txt", "text/plain", "AAAA"), ("b.png", "image/png", "AAAA"), file_of(1, 500, "wide.png"))
    wait(browser, lambda driver: "wide.png" in text_of(driver, "#status"))
    said = text_of(browser, "#status")
    assert "a.txt is no picture that the server reads." in said
    assert "b.png is damaged, or this browser does not show its kind." in said
    assert "wide.png has 0 megapixels" in said
    assert tray(browser) == []
    give(browser, "drop", file_of(1), file_of(2), file_of(3))
    wait(browser, lambda driver: "at most 2 pictures" in text_of(driver, "#status"))
    assert tray(browser) == ["cat.png", "cat.png"]


def test_a_sound_file_is_sent_shown_and_kept(browser: Any, serve: Callable[..., Any], tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "hello.wav"
    sound_model.save_sound_model(folder)
    path.write_bytes(sound_model.wav(sound_model.sound(1)))
    with serve(str(folder), "--dtype", "float32", "--limit-mm-per-prompt", '{"audio": 1}') as server:
        open_page(browser, server.url)
        assert text_of(browser, "#add-files") == "Add sounds"
        give(browser, "drop", file_of(1))
        wait(browser, lambda driver: text_of(driver, "#status") == "cat.png is no sound that the server reads.")
        browser.find_element(By.ID, "files").send_keys(str(path))
        wait(browser, lambda driver: text_of(driver, "#tray p") == "1 of 1 sounds; each at most 26.2 MB")
        assert violations(browser) == []
        browser.execute_script("document.getElementById('max_tokens').value = '5'")
        browser.execute_script("document.getElementById('temperature').value = '0'")
        browser.find_element(By.ID, "prompt").send_keys(sound_model.QUESTION, Keys.ENTER)
        wait(browser, lambda driver: text_of(driver, ".assistant .facts"))
        messages: Any = [{"role": "user", "content": sound_model.parts((1,))}]
        model = server.client.models.list().data[0].id
        expected = server.client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=5)
        shown = browser.execute_script("return state.chat.messages.at(-1).content")
        assert shown == expected.choices[0].message.content
        duration = "return document.querySelector('.message.user audio')?.duration"
        browser.refresh()
        wait(browser, lambda driver: (driver.execute_script(duration) or 0) > 0)
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Any, server: Any, scheme: str) -> None:
    open_page(browser, server.url)
    set_scheme(browser, scheme)
    give(browser, "drop", file_of(1), file_of(2))
    wait(browser, lambda driver: len(tray(driver)) == 2)
    assert violations(browser) == []
    browser.execute_script("document.getElementById('max_tokens').value = '2'")
    browser.find_element(By.ID, "prompt").send_keys(Keys.ENTER)  # pictures without a text
    wait(browser, lambda driver: text_of(driver, ".assistant .facts"))
    assert violations(browser) == []
    set_scheme(browser, "light")


def test_a_model_for_text_takes_none(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    assert not browser.find_element(By.ID, "add-files").is_displayed()
    give(browser, "drop", file_of(1))
    wait(browser, lambda driver: text_of(driver, "#status") == "This model takes text only.")
    assert tray(browser) == []
