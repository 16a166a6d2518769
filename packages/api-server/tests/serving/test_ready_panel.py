"""What a terminal shows when a server is ready."""

from __future__ import annotations

from server_helpers.speech import SpeechEngine

from llmstack_server.options.config import HTTPConfig
from llmstack_server.options.secret import Secret
from llmstack_server.serving.ready_panel import ReadySummary, ready_panel, ready_summary
from llmstack_server.testing import FakeEngineClient, ready_state

SUMMARY = ReadySummary("model m, bfloat16 on cpu")
ADDRESS = "http://127.0.0.1:8000"


def test_the_addresses_and_a_request_to_paste_are_shown() -> None:
    shown = ready_panel(ADDRESS, SUMMARY, HTTPConfig(), has_color=False)
    assert shown.startswith("── llmstack: model m, bfloat16 on cpu ")
    assert "  chat     http://127.0.0.1:8000/\n" in shown
    assert "\ncurl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{" in shown
    assert "  live     http://127.0.0.1:8000/live\n" in shown
    assert "\x1b" not in shown
    colored = ready_panel(ADDRESS, SUMMARY, HTTPConfig(), has_color=True)
    assert "\x1b[36mhttp://127.0.0.1:8000/docs\x1b[0m" in colored


def test_pages_that_are_off_are_not_shown() -> None:
    shown = ready_panel(ADDRESS, SUMMARY, HTTPConfig(has_chat_page=False, has_docs=False), has_color=False)
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("  ")] == ["API", "metrics"]


def test_the_request_to_paste_has_what_the_server_asks_for() -> None:
    with_key = ready_panel(ADDRESS, SUMMARY, HTTPConfig(api_keys=(Secret("k"),)), has_color=False)
    assert ' -H "Authorization: Bearer $LLMSTACK_API_KEY" ' in with_key
    vectors = ready_panel(ADDRESS, SUMMARY._replace(is_generative=False), HTTPConfig(), has_color=False)
    assert f"curl {ADDRESS}/v1/embeddings " in vectors
    assert "  chat " not in vectors
    on_socket = ready_panel("unix:/run/x.sock", SUMMARY, HTTPConfig(uds="/run/x.sock"), has_color=False)
    assert "curl --unix-socket /run/x.sock http://localhost/v1/completions " in on_socket
    assert "  API " not in on_socket


def test_the_request_to_a_model_that_transcribes_sends_a_file() -> None:
    summary = SUMMARY._replace(transcriber="my models/whisper")
    shown = ready_panel(ADDRESS, summary, HTTPConfig(), has_color=False)
    assert f"\ncurl {ADDRESS}/v1/audio/transcriptions -F file=@speech.wav -F 'model=my models/whisper'\n" in shown
    assert "/v1/completions" not in shown
    with_key = ready_panel(ADDRESS, summary, HTTPConfig(api_keys=(Secret("k"),)), has_color=False)
    assert '-H "Authorization: Bearer $LLMSTACK_API_KEY" -F file=' in with_key


async def test_the_summary_names_a_model_that_transcribes() -> None:
    speech, text = SpeechEngine(" yes"), FakeEngineClient()
    assert ready_summary(ready_state(speech)).transcriber == "fake"
    assert ready_summary(ready_state(text)).transcriber == ""
    await speech.speech.shutdown()


def test_a_server_on_all_addresses_shows_one_that_a_browser_opens() -> None:
    for any_host, local in (("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")):
        shown = ready_panel(f"https://{any_host}:80", SUMMARY, HTTPConfig(), has_color=False)
        assert f"  API      https://{local}:80/v1" in shown
