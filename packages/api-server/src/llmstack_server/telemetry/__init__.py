"""What follows each request from its first byte to its last: OpenTelemetry spans and lines of a trace.

Off, there is no middleware, the engine is not wrapped and OpenTelemetry's SDK is not imported: it costs nothing.

Modules: `request_trace` (what is noted of one request), `middleware` and `engine` (where it is noted), `spans` and
`lines` (what becomes of it), `otlp` (where spans go), `open` (what was asked for).
"""
