"""Metrics of the pictures and the sound of requests, from the front end's counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from llmstack_llm.media.processor import MediaStats
from llmstack_llm.speech.served import Speech
from llmstack_server.observability.metric_aliases import PREFIX

# Name of a counter to the field of `MediaStats`, and its text.
_COUNTERS = {
    "media_lookups": ("num_queries", "Pictures that were asked of the store of decoded ones."),
    "media_lookup_hits": ("num_hits", "Pictures that were decoded already."),
    "media_bytes": ("num_bytes", "Bytes of pictures as they came."),
    "media_decode_cpu_seconds": ("decode_s", "Processor time of the children that decode."),
}
_BY_RESULT = {
    "media_fetches": ("fetch_results", "result", "Fetches of pictures, data: included: ok, or the code of the error."),
    "media_failures": ("failures", "code", "Pictures that could not be read, by the code of the error."),
}


_OF_SPEECH = {
    "audio_seconds": "Seconds of sound files that have a transcript.",
    "audio_transcription_seconds": "Seconds that passed while they were transcribed.",
    "audio_repeated_seconds": "Seconds of sound that were in more than one window.",
    "audio_decoded_seconds": "Seconds of sound that were decoded.",
    "audio_decode_cpu_seconds": "Processor time of the children that decode sound.",
    "realtime_audio_seconds": "Seconds of sound that realtime sessions have sent.",
}


class SpeechMetrics:
    """A collector of the families of a model that transcribes; there are none for another one."""

    def __init__(self, model_name: str, read: Callable[[], Speech | None]) -> None:
        """`read`: What has the counts; None for a model that does not transcribe."""
        self._model_name = model_name
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The counts as they are now, each family once."""
        speech = self._read()
        if speech is None or speech.files is None:
            return
        counts, files = speech.counts, speech.files
        of_files = (counts.sound_s, counts.passed_s, counts.repeated_s, files.decoded_s, files.processor_s)
        values = (*of_files, counts.session_s)
        for (name, text), value in zip(_OF_SPEECH.items(), values, strict=True):
            family = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
            family.add_metric((self._model_name,), value)
            yield family
        sessions = GaugeMetricFamily(PREFIX + "realtime_sessions", "Open realtime sessions.", labels=("model_name",))
        sessions.add_metric((self._model_name,), counts.num_sessions)
        yield sessions
        text = "Sound files that were refused, by the code of the error."
        family = CounterMetricFamily(PREFIX + "audio_failures", text, labels=("model_name", "code"))
        for code, number in files.failures.items():
            family.add_metric((self._model_name, code), number)
        yield family


class MediaMetrics:
    """A collector of the families of media; there are none for a model without."""

    def __init__(self, model_name: str, read: Callable[[], MediaStats | None]) -> None:
        """`read`: The counts since the start; None for a model without media."""
        self._model_name = model_name
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The counts as they are now, each family once."""
        stats = self._read()
        if stats is None:
            return
        for name, (field, text) in _COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=("model_name",))
            family.add_metric((self._model_name,), getattr(stats, field))
            yield family
        for name, (field, label, text) in _BY_RESULT.items():
            family = CounterMetricFamily(PREFIX + name, text, labels=("model_name", label))
            for value, number in getattr(stats, field).items():
                family.add_metric((self._model_name, value), number)
            yield family
