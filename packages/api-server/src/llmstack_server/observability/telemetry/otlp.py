"""Export of spans to an OpenTelemetry collector."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llmstack_server import server_version
from llmstack_server.options.errors import ServeError
from llmstack_server.options.observability import ObservabilityConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from llmstack_server.observability.telemetry.spans import SpanObserver

_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class SpanSender:
    """Owns the tracer, and the thread that sends spans in batches from a bounded queue.

    OpenTelemetry's SDK reads the `OTEL_*` variables.

    Attributes:
        observer: Makes the spans of each request.
    """

    def __init__(self, config: ObservabilityConfig, model_name: str) -> None:
        """Raises ServeError where OpenTelemetry is not installed, or the protocol is unknown."""
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            from llmstack_server.observability.telemetry.spans import SpanObserver
        except ImportError:
            raise ServeError(
                "--otlp-traces-endpoint needs OpenTelemetry: pip install 'llmstack-server[otel]'", exit_code=2
            ) from None
        attributes = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or "llmstack",
            "service.version": server_version(),
        }
        # Not the global provider of the process: spans of other libraries must not go to this collector.
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(config.otlp_traces_endpoint or "")))
        tracer = self._provider.get_tracer("llmstack_server", server_version())
        self.observer: SpanObserver = SpanObserver(tracer, model_name, is_detailed=config.has_detailed_traces)

    def close(self) -> None:
        """Sends the remaining spans and ends the thread; blocks while the exporter tries to reach its collector."""
        self._provider.shutdown()


def protocol_of(endpoint: str) -> str:
    """`grpc` or `http/protobuf`: from the environment, else by the path at which HTTP collectors listen."""
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
