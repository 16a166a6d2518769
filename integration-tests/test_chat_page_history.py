"""Chats of the chat page in a real browser: kept, resumed, changed, exported; and where the view stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser_helpers import By, Keys, open_browser, set_scheme, text_of, violations, wait
from chat_page_helpers import open_page, send, send_and_wait

pytestmark = pytest.mark.full  # a browser takes seconds to start

# Answers of a server that does not exist: chunks of one chat completion, or an error before them.
FAKE_FETCH = """
const [chunks, status] = arguments;
window.realFetch ??= window.fetch;
window.fetch = (path, options) => {
  if (!path.startsWith("v1/chat/completions")) return window.realFetch(path, options);
  window.lastBody = JSON.parse(options.body);
  const failure = JSON.stringify({ error: { message: "No room." } });
  if (status !== 200) return Promise.resolve(new Response(failure, { status }));
  const events = chunks.map((choice) => `data: ${JSON.stringify({ choices: [choice] })}\\n\\n`).join("");
  return Promise.resolve(new Response(`${events}data: [DONE]\\n\\n`, { status: 200 }));
};
"""
# All that the browser's database holds.
KEPT = """
const done = arguments[arguments.length - 1];
const request = indexedDB.open("llmstack");
request.onsuccess = async () => {
  const names = [...request.result.objectStoreNames];
  const read = (name) => new Promise((resolve) => {
    const all = request.result.transaction(name).objectStore(name).getAll();
    all.onsuccess = () => resolve(all.result);
  });
  done(JSON.stringify(await Promise.all(names.map(read))));
};
"""
DRAFT = "store.value(draftName(state.chat)).then((draft) => arguments[arguments.length - 1](draft?.text))"
SLOW = {"offline": False, "latency": 0, "downloadThroughput": 2000, "uploadThroughput": -1}  # bytes per second


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


def shown(browser: Any, selector: str) -> list[str]:
    """The texts of elements, in one call: the page may draw them again between two."""
    script = "return [...document.querySelectorAll(arguments[0])].map((found) => found.innerText.trim())"
    found: list[str] = browser.execute_script(script, selector)
    return found


def titles(browser: Any) -> list[str]:
    return shown(browser, ".open-chat")


def texts(browser: Any, role: str) -> list[str]:
    return shown(browser, f".{role} .text")


def click(browser: Any, name: str, within: str = "#messages") -> None:
    found = browser.find_elements(By.CSS_SELECTOR, f"{within} button")
    next(one for one in reversed(found) if one.text == name).click()


def choose(browser: Any, name: str) -> None:
    browser.find_element(By.CSS_SELECTOR, ".menu summary").click()
    click(browser, name, "#chats .menu")


def answer_with(browser: Any, *choices: dict[str, Any], status: int = 200) -> None:
    browser.execute_script(FAKE_FETCH, list(choices), status)


def delta(**fields: Any) -> dict[str, Any]:
    finish_reason = fields.pop("finish_reason", None)
    return {"index": 0, "delta": fields, "finish_reason": finish_reason}


def test_chats_are_listed_renamed_exported_and_deleted_and_a_reload_loses_nothing(
    browser: Any, demo_server: Any
) -> None:
    open_page(browser, demo_server.url)
    send_and_wait(browser, "Tell me of a king.", temperature="0", max_tokens="12", system="Be kind.")
    before = texts(browser, "assistant")
    browser.find_element(By.ID, "prompt").send_keys("half a tho")
    wait(browser, lambda driver: driver.execute_async_script(DRAFT) == "half a tho")
    browser.refresh()
    wait(browser, lambda driver: texts(driver, "assistant") == before)
    assert browser.find_element(By.ID, "prompt").get_property("value") == "half a tho"
    assert browser.find_element(By.ID, "max_tokens").get_property("value") == "12"
    assert titles(browser) == ["Tell me of a king."]
    choose(browser, "Rename")
    field = browser.find_element(By.ID, "title-field")
    field.clear()
    field.send_keys("A king", Keys.ENTER)
    wait(browser, lambda driver: titles(driver) == ["A king"])
    exported = browser.execute_script("window.files = []; download = (...file) => window.files.push(file)")
    choose(browser, "Export as Markdown")
    choose(browser, "Export as JSON")
    exported = wait(browser, lambda driver: driver.execute_script("return files.length === 2 && files"))
    assert [name for name, _, _ in exported] == ["a-king.md", "a-king.json"]
    assert exported[0][2].startswith("# A king\n\n")
    assert [message["role"] for message in json.loads(exported[1][2])["messages"]] == ["user", "assistant"]
    browser.find_element(By.ID, "new-chat").click()
    send_and_wait(browser, "Tell me of a queen.", max_tokens="6")
    wait(browser, lambda driver: titles(driver) == ["Tell me of a queen.", "A king"])
    browser.find_elements(By.CSS_SELECTOR, ".open-chat")[1].click()
    wait(browser, lambda driver: texts(driver, "assistant") == before)
    browser.find_elements(By.CSS_SELECTOR, ".open-chat")[0].click()
    choose(browser, "Delete")
    assert violations(browser) == []
    click(browser, "Delete", "#delete-dialog")
    wait(browser, lambda driver: titles(driver) == ["A king"])
    browser.refresh()
    wait(browser, lambda driver: titles(driver) == ["A king"])


def test_an_answer_survives_a_reload(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    asked = [{"role": "user", "content": "A long story."}]
    model = demo_server.client.models.list().data[0].id
    expected = demo_server.client.chat.completions.create(model=model, messages=asked, temperature=0, max_tokens=120)
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", SLOW)
    try:
        send(browser, "A long story.", temperature="0", max_tokens="120", system="")
        wait(browser, lambda driver: len(text_of(driver, ".assistant .text")) > 10)
        assert not text_of(browser, ".assistant .facts")
    finally:
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", SLOW | {"downloadThroughput": -1})
    browser.refresh()
    wait(browser, lambda driver: "tokens" in text_of(driver, ".assistant .facts"))
    whole = expected.choices[0].message.content or ""
    assert " ".join(text_of(browser, ".assistant .text").split()) == " ".join(whole.split())
    assert demo_server.metric("llmstack:resumable_streams_total") >= 2


def test_a_stopped_answer_ends_on_the_server_and_goes_on_where_it_stopped(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", SLOW)
    try:
        send(browser, "A long story.", temperature="0", max_tokens="200")
        wait(browser, lambda driver: len(text_of(driver, ".assistant .text")) > 10)
        browser.find_element(By.ID, "stop").click()
        wait(browser, lambda driver: "stopped" in text_of(driver, ".assistant .facts"))
    finally:
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", SLOW | {"downloadThroughput": -1})
    demo_server.wait_for(lambda: demo_server.metric("vllm:num_requests_running") == 0, "end of the request")
    part = text_of(browser, ".assistant .text")
    click(browser, "Continue")
    wait(browser, lambda driver: "tokens per second" in text_of(driver, ".assistant .facts"))
    assert text_of(browser, ".assistant .text").startswith(part)
    assert len(texts(browser, "assistant")) == 1


def test_messages_are_changed_and_answers_made_again(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    send_and_wait(browser, "Tell me of a king.", temperature="0", max_tokens="8")
    first = texts(browser, "assistant")
    click(browser, "Regenerate")
    wait(browser, lambda driver: driver.find_element(By.ID, "send").is_displayed())
    wait(browser, lambda driver: texts(driver, "assistant") == first)
    prompt = browser.find_element(By.ID, "prompt")
    prompt.send_keys(Keys.ARROW_UP)
    assert prompt.get_property("value") == "Tell me of a king."
    assert violations(browser) == []
    prompt.send_keys(Keys.ESCAPE)
    assert prompt.get_property("value") == ""
    click(browser, "Edit")
    prompt.clear()
    prompt.send_keys("Tell me of a fox.", Keys.ENTER)
    wait(browser, lambda driver: texts(driver, "user") == ["Tell me of a fox."])
    wait(browser, lambda driver: text_of(driver, ".assistant .facts"))
    assert len(texts(browser, "assistant")) == 1


def test_a_failed_request_gives_the_text_back(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    answer_with(browser, status=503)
    send(browser, "A question.")
    wait(browser, lambda driver: text_of(driver, "#status") == "No room.")
    assert texts(browser, "user") == []
    for _ in range(2):  # a reload does not lose it either
        wait(browser, lambda driver: driver.find_element(By.ID, "prompt").get_property("value") == "A question.")
        assert titles(browser) == []
        browser.refresh()
        wait(browser, lambda driver: driver.find_elements(By.CSS_SELECTOR, "#model option"))
    answer_with(browser, delta(content="Yes."), delta(finish_reason="stop"))
    browser.find_element(By.ID, "prompt").send_keys(Keys.ENTER)
    wait(browser, lambda driver: texts(driver, "assistant") == ["Yes."])
    answer_with(browser, status=503)
    click(browser, "Regenerate")
    wait(browser, lambda driver: text_of(driver, "#status") == "No room.")
    assert texts(browser, "assistant") == ["Yes."]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_reasoning_folds_calls_are_drawn_and_a_result_goes_to_the_model(
    browser: Any, demo_server: Any, scheme: str
) -> None:
    set_scheme(browser, scheme)
    open_page(browser, demo_server.url)
    part = {"index": 0, "id": "call_1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    answer_with(browser, delta(reasoning="I ask."), delta(content="One moment."), delta(tool_calls=[part]))
    send(browser, "Rain?", tools='[{"name": "weather", "parameters": {"type": "object"}}]')
    wait(browser, lambda driver: '"city": "Oslo"' in text_of(driver, ".call"))
    reasoning = browser.find_element(By.CSS_SELECTOR, ".reasoning")
    assert reasoning.get_property("open") is False
    reasoning.find_element(By.TAG_NAME, "summary").click()
    assert "I ask." in reasoning.text
    assert violations(browser) == []
    answer_with(browser, delta(content="It rains."), delta(finish_reason="stop"))
    browser.find_element(By.CSS_SELECTOR, ".results textarea").send_keys("rain")
    click(browser, "Send the results")
    wait(browser, lambda driver: texts(driver, "assistant")[-1] == "It rains.")
    sent = browser.execute_script("return lastBody.messages")
    assert sent[-1] == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
    assert sent[-2]["tool_calls"][0]["function"]["name"] == "weather"
    set_scheme(browser, "light")


def test_a_json_schema_is_kept_to(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    schema = {"type": "object", "properties": {"name": {"enum": ["fox", "hen"]}}, "required": ["name"]}
    send_and_wait(browser, "Who?", schema=json.dumps(schema), max_tokens="40")
    assert json.loads(text_of(browser, ".assistant pre"))["name"] in ("fox", "hen")


def test_the_last_line_is_in_view_and_scrolling_up_ends_the_following(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    answer_with(browser, delta(content="\n\n".join(f"Line {number}." for number in range(90))))
    send(browser, "Count.")
    wait(browser, lambda driver: "Line 89." in text_of(driver, ".assistant .text"))
    for size in ((1200, 900), (390, 844)):
        browser.set_window_size(*size)
        wait(browser, lambda driver: driver.execute_script(
            "const line = document.querySelector('.assistant .text p:last-child').getBoundingClientRect();"
            "const log = byId('messages').getBoundingClientRect();"
            "return line.bottom <= log.bottom && log.bottom <= byId('composer').getBoundingClientRect().top"
        ))  # fmt: skip
    browser.set_window_size(1200, 900)
    browser.execute_script("byId('messages').scrollTop = 100")
    wait(browser, lambda driver: driver.find_element(By.ID, "to-end").is_displayed())
    browser.execute_script("state.chat.messages.at(-1).content += '\\n\\nMore.'; show()")
    assert browser.execute_script("return byId('messages').scrollTop") == 100
    assert violations(browser) == []
    browser.find_element(By.ID, "to-end").click()
    wait(browser, lambda driver: driver.execute_script("return list.isFollowing && byId('messages').scrollTop > 100"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_drawer_of_a_phone_and_the_settings_are_accessible(browser: Any, demo_server: Any, scheme: str) -> None:
    set_scheme(browser, scheme)
    browser.set_window_size(500, 844)  # the narrowest window of this browser
    open_page(browser, demo_server.url)
    browser.find_element(By.ID, "open-sidebar").click()
    assert browser.find_element(By.ID, "new-chat").is_displayed()
    assert violations(browser) == []
    browser.find_element(By.ID, "new-chat").send_keys(Keys.ESCAPE)
    wait(browser, lambda driver: not driver.find_element(By.ID, "new-chat").is_displayed())
    browser.find_element(By.ID, "open-settings").click()
    assert violations(browser) == []
    browser.find_element(By.CSS_SELECTOR, "#settings .icon").click()
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    browser.set_window_size(1200, 900)
    set_scheme(browser, "light")


def test_a_system_prompt_is_offered_where_the_template_uses_it(browser: Any, demo_server: Any) -> None:
    open_page(browser, demo_server.url)
    fact = demo_server.get_json("/v1/models")["data"][0]["chat"]["has_system_prompt"]
    hidden = browser.execute_script("return byId('system-field').hidden")
    assert hidden is not fact
    shown = browser.execute_script(
        "models.list[0].chat.has_system_prompt = !models.list[0].chat.has_system_prompt; showModel();"
        "return byId('system-field').hidden"
    )
    assert shown is fact
    assert browser.find_element(By.ID, "max_tokens").get_attribute("placeholder").endswith("this page's")


def test_the_database_holds_chats_and_no_key(browser: Any, serve: Any) -> None:
    with serve("--api-key", "key-of-this-test") as server:
        browser.get(server.url)
        field = wait(browser, lambda driver: driver.find_element(By.ID, "key"))
        wait(browser, lambda driver: field.is_displayed())
        field.send_keys("key-of-this-test", Keys.ENTER)
        wait(browser, lambda driver: driver.find_elements(By.CSS_SELECTOR, "#model option"))
        send_and_wait(browser, "Tell me of a king.", max_tokens="6")
        kept = browser.execute_async_script(KEPT)
    assert "Tell me of a king." in kept
    assert "key-of-this-test" not in kept
