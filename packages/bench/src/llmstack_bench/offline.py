"""Offline measurement of llmstack's engine: throughput, or latency of a batch."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmstack_bench.errors import BenchError
from llmstack_bench.metrics import percentile
from llmstack_bench.published import published_requests
from llmstack_bench.workload import BenchRequest, RandomWorkload

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)
_NEEDS_LLM = "needs the package llmstack-llm: pip install 'llmstack-bench[offline]'"
_SEED_STEP = 1_000_003


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of `LLM.generate`.

    Attributes:
        num_cached_tokens: Prompt tokens that the prefix cache supplied.
    """

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@contextlib.contextmanager
def offline_engine(options: argparse.Namespace) -> Iterator[OfflineEngine]:
    """The engine that the flags describe; closed at the end of the context.

    Raises:
        BenchError: llmstack-llm is missing, or refuses the options; the text gives the reason.
    """
    try:
        llm_package = importlib.import_module("llmstack_llm")
    except ModuleNotFoundError as error:
        raise BenchError(_NEEDS_LLM) from error
    typed_errors = (
        importlib.import_module("llmstack_types").LLMStackError,
        importlib.import_module("llmstack_model_files").ModelFilesError,
    )
    try:
        started_s = time.perf_counter()
        with llm_package.LLM(**engine_options(options)) as llm:
            refuse_slow_kernels(llm.llm_engine.ready.backends)
            yield OfflineEngine(llm, llm_package.SamplingParams, options, time.perf_counter() - started_s)
    except typed_errors as error:
        raise BenchError(str(error)) from error


def refuse_slow_kernels(backends: Mapping[str, str]) -> None:
    """Refuses backends without native kernels: their figures would mean nothing, since they are many times slower.

    Raises:
        BenchError: `backends`, the model runner's report, names the reference of an operation that every device has
            code of its own for, and LLMSTACK_KERNELS does not ask for that.
    """
    if backends.get("rms_norm") == "reference" and not os.environ.get("LLMSTACK_KERNELS"):
        raise BenchError(
            "The native kernels are not built, so nothing is measured: run `python -m llmstack_kernels.build_native`; "
            "or set LLMSTACK_KERNELS=reference to measure without them."
        )


@dataclass(frozen=True, slots=True)
class OfflineEngine:
    """A started `LLM` and the settings of its prompts.

    Attributes:
        start_s: Duration of the start in seconds.
    """

    llm: Any
    make_params: Callable[..., Any]
    options: argparse.Namespace
    start_s: float

    def generate(self, num_prompts: int, run: int) -> Batch:
        """Generates from prompts that differ in every `run`, so that the prefix cache has no hits from earlier runs."""
        options = self.options
        if getattr(options, "dataset_name", "random") != "random":
            requests = self._published(num_prompts)
        else:
            requests = self._random(num_prompts, run)
        prompts = [request.prompt for request in requests]
        if getattr(options, "use_beam_search", False):
            return self._search(prompts)
        params = [
            self.make_params(
                n=options.n,
                temperature=options.temperature,
                ignore_eos=True,
                max_tokens=request.num_output_tokens,
                detokenize=not options.disable_detokenize,
            )
            for request in requests
        ]
        started_s = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=_shows_progress(options))
        seconds = time.perf_counter() - started_s
        return Batch(
            seconds,
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
            sum(output.num_cached_tokens or 0 for output in outputs),
        )

    def _search(self, prompts: Sequence[Any]) -> Batch:
        """The `--n` best beams of each prompt."""
        params = importlib.import_module("llmstack_llm").BeamSearchParams(
            beam_width=self.options.n, max_tokens=self.options.output_len, ignore_eos=True
        )
        started_s = time.perf_counter()
        outputs = self.llm.beam_search(prompts, params, use_tqdm=_shows_progress(self.options))
        seconds = time.perf_counter() - started_s
        num_prompt_tokens = sum(map(len, prompts))
        num_output_tokens = sum(
            len(sequence.tokens) - len(prompt)
            for prompt, output in zip(prompts, outputs, strict=True)
            for sequence in output.sequences
        )
        return Batch(seconds, num_prompt_tokens, num_output_tokens, 0)

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Records a profile meanwhile, with `--profile`."""
        if not self.options.profile:
            yield
            return
        self.llm.start_profile()
        try:
            yield
        finally:
            for path in self.llm.stop_profile():
                sys.stderr.write(f"profile: {path}\n")

    def _published(self, num_prompts: int) -> list[BenchRequest]:
        """Requests of a file; the prefix cache finds those that an earlier run has sent."""
        options = argparse.Namespace(
            **vars(self.options) | {"num_prompts": num_prompts, "random_output_len": self.options.output_len}
        )
        if options.dataset_path is None:
            raise BenchError(f"--dataset-path: is needed for --dataset-name {options.dataset_name}", exit_code=2)
        encode = self.llm.get_tokenizer().encode
        vocab_size = self.llm.llm_engine.model_config.vocab_size
        return published_requests(
            options, lambda text: len(encode(text, add_special_tokens=False)), vocab_size, options.seed
        )

    def _random(self, num_prompts: int, run: int) -> list[BenchRequest]:
        options = self.options
        workload = RandomWorkload(
            num_prompts,
            options.input_len,
            options.output_len,
            options.prefix_len,
            range_ratio=getattr(options, "random_range_ratio", 0.0),
            vocab_size=self.llm.llm_engine.model_config.vocab_size,
            seed=options.seed + _SEED_STEP * run,
        )
        return workload.requests()


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM`: the flags that were given, then `--engine-option`."""
    named = {"model": options.model, "dtype": options.dtype, "load_format": options.load_format}
    given = {"tokenizer": options.tokenizer, "max_model_len": options.max_model_len}
    named |= {name: value for name, value in given.items() if value is not None}
    return named | {name.replace("-", "_"): value for name, value in options.engine_option}


def measure_throughput(options: argparse.Namespace) -> dict[str, float]:
    """Metric name to median over the iterations; each submits `--num-prompts` requests at once."""
    with offline_engine(options) as engine:
        for run in range(options.num_iters_warmup):
            engine.generate(options.num_warmups or min(options.num_prompts, 8), options.num_iters + run)
        with engine.profiled():
            batches = [engine.generate(options.num_prompts, run) for run in range(options.num_iters)]
        rates = {
            "duration": [batch.seconds for batch in batches],
            "requests_per_second": [options.num_prompts / batch.seconds for batch in batches],
            "prompt_tokens_per_second": [batch.num_prompt_tokens / batch.seconds for batch in batches],
            "output_tokens_per_second": [batch.num_output_tokens / batch.seconds for batch in batches],
            "tokens_per_second": [
                (batch.num_prompt_tokens + batch.num_output_tokens) / batch.seconds for batch in batches
            ],
        }
        return {
            "completed": float(options.num_prompts),
            **{name: statistics.median(values) for name, values in rates.items()},
            **_common(engine, batches),
        }


def measure_latency(options: argparse.Namespace) -> dict[str, float]:
    """Metric name to value over the iterations of one batch of `--batch-size` requests."""
    with offline_engine(options) as engine:
        for run in range(options.num_iters_warmup):
            engine.generate(options.batch_size, options.num_iters + run)
        with engine.profiled():
            batches = [engine.generate(options.batch_size, run) for run in range(options.num_iters)]
        return {**latency_values([batch.seconds for batch in batches]), **_common(engine, batches)}


def latency_values(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and percentiles of batches, in milliseconds."""
    milliseconds = [value * 1000 for value in seconds]
    return {
        "median_latency_ms": statistics.median(milliseconds),
        "mean_latency_ms": statistics.fmean(milliseconds),
        **{f"p{percent}_latency_ms": percentile(milliseconds, percent) for percent in LATENCY_PERCENTILES},
    }


def _common(engine: OfflineEngine, batches: Sequence[Batch]) -> dict[str, float]:
    num_prompt_tokens = sum(batch.num_prompt_tokens for batch in batches)
    return {
        "cached_prompt_share": sum(batch.num_cached_tokens for batch in batches) / max(1, num_prompt_tokens),
        "start_s": engine.start_s,
        # Linux counts it in KiB.
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _shows_progress(options: argparse.Namespace) -> bool:
    return not options.disable_tqdm and sys.stderr.isatty()
