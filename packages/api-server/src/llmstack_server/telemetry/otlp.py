"""Sends spans to an OpenTelemetry collector. What `OTEL_*` variables say is read by its SDK, and by nothing here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llmstack_server.errors import ServeError
from llmstack_server.observability import ObservabilityConfig
from llmstack_server.version import server_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from llmstack_server.telemetry.spans import SpanObserver

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class SpanSender:
    """Owns the tracer and the thread that sends spans, by the hundred and from a bounded queue.

    Attributes:
        observer: What makes the spans.
    """

    def __init__(self, config: ObservabilityConfig, model_name: str) -> None:
        """Raises ServeError where OpenTelemetry is not installed, or the protocol is not known."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            from llmstack_server.telemetry.spans import SpanObserver
        except ImportError:
            raise ServeError(
                "--otlp-traces-endpoint needs OpenTelemetry: pip install 'llmstack-server[otel]'", exit_code=2
            ) from None
        attributes = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or "llmstack",
            "service.version": server_version(),
        }
        # Not the process's global provider: nobody else's spans go where ours do.
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(config.otlp_traces_endpoint or "")))
        tracer = self._provider.get_tracer("llmstack_server", server_version())
        self.observer: SpanObserver = SpanObserver(tracer, model_name, is_detailed=config.has_detailed_traces)

    def close(self) -> None:
        """Sends what is left and ends the thread; blocks for as long as the exporter tries to reach its collector."""
        self._provider.shutdown()


def protocol_of(endpoint: str) -> str:
    """`grpc` or `http/protobuf`: as the environment says, else by the path that HTTP collectors listen at."""
    named = next((os.environ[name] for name in _PROTOCOL_VARIABLES if os.environ.get(name)), None)
    if named is None:
        return "http/protobuf" if endpoint.rstrip("/").endswith("/v1/traces") else "grpc"
    if named not in ("grpc", "http/protobuf"):
        raise ServeError(f"{_PROTOCOL_VARIABLES[0]}: '{named[:32]}' is none of grpc, http/protobuf", exit_code=2)
    return named


def _exporter(endpoint: str) -> SpanExporter:
    if protocol_of(endpoint) == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)
