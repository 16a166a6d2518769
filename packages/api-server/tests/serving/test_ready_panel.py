"""What a terminal shows when a server is ready."""

from __future__ import annotations

from llmstack_server.serving.api_process import ready_panel


def test_the_addresses_and_a_request_to_paste_are_shown() -> None:
    shown = ready_panel("http://127.0.0.1:8000", "model m, bfloat16 on cpu", has_color=False)
    assert shown.startswith("── llmstack: model m, bfloat16 on cpu ")
    assert "  chat     http://127.0.0.1:8000/\n" in shown
    assert "\ncurl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{" in shown
    assert "\x1b" not in shown
    assert "\x1b[36mhttp://127.0.0.1:8000/docs\x1b[0m" in ready_panel("http://127.0.0.1:8000", "m", has_color=True)
