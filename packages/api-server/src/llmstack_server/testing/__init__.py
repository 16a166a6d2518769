"""A fake engine front end, and an ASGI client without sockets."""

from llmstack_server.testing.asgi_client import Answer, call
from llmstack_server.testing.byte_tokenizer import ByteTokenizer
from llmstack_server.testing.engine_client import LIMITS, READY, FakeEngineClient, ready_state

__all__ = ["LIMITS", "READY", "Answer", "ByteTokenizer", "FakeEngineClient", "call", "ready_state"]
