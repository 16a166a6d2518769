"""What follows each request from its first byte to its last: OpenTelemetry spans and lines of a trace.

Off, nothing of this is imported, no middleware is added and the engine is not wrapped, so it costs nothing.

Modules: `request_trace` (what is noted of one request), `middleware` and `engine` (where it is noted), `spans` (what
becomes of it), `otlp` (where spans go).
"""
