"""The subcommand `llmstack logprobs`."""

from __future__ import annotations

import argparse
import sys

MAX_TOP = 20
_SETTINGS = ("dtype", "quantization", "kv_cache_dtype", "gguf_activations")


class LogprobsCommand:
    """The subcommand `llmstack logprobs REQUEST --log FILE`."""

    name = "logprobs"
    help = "compute the log-probabilities of an answer in a step log again, to the same bits"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        from pathlib import Path  # late: other commands do without it

        parser.add_argument("request", metavar="REQUEST", help="the id in the answer, such as chatcmpl-…")
        parser.add_argument(
            "--log", type=Path, required=True, metavar="FILE", help="what `llmstack serve --record-steps FILE` wrote"
        )
        parser.add_argument("--model", help="the model, as `serve` takes it (default: what `serve` takes without one)")
        parser.add_argument(
            "--weights", type=Path, metavar="DIR",
            help="folder of the weights that the answer was computed with, if they had been changed in place",
        )  # fmt: skip
        parser.add_argument("--adapter", type=Path, metavar="FOLDER", help="the LoRA adapter of the request")
        parser.add_argument(
            "--top", type=int, default=0, choices=range(MAX_TOP + 1), metavar="N",
            help=f"also give the N likeliest tokens of each place, at most {MAX_TOP}",
        )  # fmt: skip
        parser.add_argument(
            "--masks", action="store_true", help="also give the tokens that the request's constraint allowed"
        )
        parser.add_argument("--routing", action="store_true", help="also give the experts that computed each token")
        for name in _SETTINGS:
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, metavar="VALUE", help="as `serve` had it, where it was set")

    def run(self, namespace: argparse.Namespace) -> int:
        """Prints one JSON object for each completion; 0, or 1 with a sentence on what is in the way."""
        import json

        from llmstack_llm.engine_args import EngineArgsError
        from llmstack_model_files import ModelFilesError
        from llmstack_server.commands.logprobs import LogprobsError, Wanted, answer_of_log, recompute
        from llmstack_server.options.errors import ServeError
        from llmstack_server.serving.launcher import model_of
        from llmstack_step_log import StepLogError
        from llmstack_types import LLMStackError

        settings = {name: value for name in _SETTINGS if (value := getattr(namespace, name)) is not None}
        wanted = Wanted(namespace.top, namespace.masks, namespace.routing)
        try:
            header, parts = answer_of_log(namespace.log, namespace.request)
            found = recompute(
                header, parts, model_of(namespace.model), wanted, namespace.adapter, settings, namespace.weights
            )
        except StepLogError as error:
            sys.stderr.write(f"llmstack logprobs: error: {namespace.log}: {error}\n")
            return 1
        except (LogprobsError, EngineArgsError, ModelFilesError, ServeError, LLMStackError) as error:
            sys.stderr.write(f"llmstack logprobs: error: {error}\n")
            return 1
        sys.stdout.writelines(json.dumps(one) + "\n" for one in found)
        return 0
