"""Inspect: a task of two samples and its scores, through an OpenAI-compatible server. Arguments: URL, model."""

import json
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

url, name = sys.argv[1:]
samples = [Sample(input="Hello", target="story"), Sample(input="Tell me about a fox.", target="no such word")]
model = get_model(f"openai-api/local/{name}", base_url=url, api_key="none")
[log] = eval(
    Task(dataset=samples, solver=generate(), scorer=includes(), config=GenerateConfig(temperature=0, max_tokens=60)),
    model=model, display="none", log_dir="logs",
)  # fmt: skip
print(
    json.dumps(
        {
            "status": log.status,
            "scores": [sample.scores["includes"].value for sample in log.samples],
            "texts": [sample.output.completion for sample in log.samples],
            "num_tokens": log.samples[0].output.usage.output_tokens,
        }
    )
)
