"""OpenTelemetry spans and trace lines of each request.

Without them there is no middleware, the engine has no observer and OpenTelemetry's SDK is not imported.

Modules: `request_trace` (the times and facts of one request), `middleware` and `engine` (where they are taken), `spans`
and `lines` (observers that export them), `otlp` (where spans are sent), `open` (the observers of a configuration).
"""
