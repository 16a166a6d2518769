"""`llmstack logprobs`: computes log-probabilities of a past answer."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NotRequired, TypedDict

from llmstack_engine_core.config import CONSTRAINT_BACKEND
from llmstack_engine_core.structured_output import LazyBackend, past_masks
from llmstack_insight.explain import parts_of
from llmstack_insight.rerun.recorded import RecordedRequest, requests_of_log
from llmstack_llm import LLM, LoRARequest
from llmstack_llm.outputs.request_output import Logprob
from llmstack_llm.weight_updates import update_weights
from llmstack_model_files import adapter_digest, resolve_model, weights_digest
from llmstack_server.commands.verify import MAX_ADAPTER_BYTES, other_numerics
from llmstack_step_log import LogHeader, read_step_log
from llmstack_types import EngineReady, SamplingParams
from llmstack_types.adapters import LoRAIdentity

_ROUTING: Final = "llmstack_model_runner.layers.routing_records"  # a runner is found by name


class Place(TypedDict):
    """A token of an answer with its log-probability, and those of the likeliest tokens there by their ids.

    `mask` has the tokens that a constraint allowed there, in base64: token t is bit t % 8 of byte t // 8.
    """

    token_id: int
    logprob: float
    top: dict[str, float]
    mask: NotRequired[str]


class Routing(TypedDict):
    """The experts that computed the tokens of a completion: those of its prompt, and its own but the last one.

    `expert_ids` has them in base64: little-endian uint16 [num_tokens, number of layers, num_choices].
    """

    layers: list[str]
    num_tokens: int
    num_choices: int
    expert_ids: str


class Part(TypedDict):
    """A completion of an answer."""

    request: str
    num_prompt_tokens: int
    tokens: list[Place]
    routing: NotRequired[Routing]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The results that are computed of an answer besides the log-probabilities of its tokens.

    Attributes:
        num_top: The likeliest tokens beside each.
        has_masks: The tokens that the request's constraint allowed.
        has_routing: The experts of each token.
    """

    num_top: int = 0
    has_masks: bool = False
    has_routing: bool = False


class LogprobsError(Exception):
    """The log-probabilities cannot be computed; the text is one sentence."""


def answer_of_log(path: Path, answer_id: str) -> tuple[LogHeader, list[RecordedRequest]]:
    """The header of a log, and the requests that make up an answer, in their order.

    Raises:
        LogprobsError: The log has no such answer, or it cannot be computed from its tokens.
        StepLogError: The log cannot be read.
    """
    run = read_step_log(path, up_to_damage=True)
    found = {one.request.request_id: one for one in requests_of_log(run).requests}
    parts = [found[name] for name in parts_of(answer_id, found)]
    if not parts:
        raise LogprobsError(f"{path} has no request {answer_id[:128]!r}")
    for one in parts:
        _check(one)
    return run.header, parts


def _check(recorded: RecordedRequest) -> None:
    """Raises LogprobsError for an answer that depends on more than tokens."""
    request = recorded.request
    if request.media:
        raise LogprobsError("its prompt has pictures or sound, whose data the log does not have")
    if not recorded.token_ids:
        raise LogprobsError("it has no tokens: it was refused, or ended before the first one")


def recompute(
    header: LogHeader, parts: list[RecordedRequest], model: str, wanted: Wanted, adapter: Path | None = None,
    settings: Mapping[str, Any] | None = None, weights: Path | None = None,
) -> list[Part]:  # fmt: skip
    """Token ids of each part with their log-probabilities, and what else is wanted.

    They have the bits that the server had: equal numeric contract ids are required. `settings`: Of the engine, such as
    `dtype`, where the server had others than the defaults. `weights`: The folder of those that the answer was computed
    with, if they were in place of the model's.

    Raises:
        LogprobsError: The bits would be others, or the adapter, a constraint or experts are missing.
        LLMStackError: The model cannot be run.
    """
    folder = resolve_model(model)
    numerics = header.numerics if parts[0].numerics is None else parts[0].numerics
    theirs = str(numerics.get("backends", {}).get("weights", ""))
    lora = _adapter_of(parts, adapter)
    if wanted.has_masks and any(one.request.sampling_params.structured_outputs is None for one in parts):
        raise LogprobsError("no constraint restricted its tokens, so it has no masks")
    compares_content = weights is None and weights_digest(folder) != theirs
    engine = LLM(
        str(folder), max_logprobs=wanted.num_top, digests_weight_content=compares_content, enable_lora=lora is not None,
        enable_prefix_caching=not wanted.has_routing, **(settings or {}),
    )  # fmt: skip
    with engine as llm:
        _check_numerics(
            header, parts[0], llm.llm_engine.ready if weights is None else update_weights(llm, str(weights))
        )
        # What runs alone has its own experts; else parts run together, to the same bits.
        groups = [[one] for one in parts] if wanted.has_routing else [parts]
        computed = [part for group in groups for part in _computed(llm, group, wanted, lora)]
        backend = _constraints(llm) if wanted.has_masks else None
        return [
            _with_masks(part, past_masks(backend(), one.request, one.token_ids)) if backend is not None else part
            for one, part in zip(parts, computed, strict=True)
        ]


def _computed(llm: LLM, parts: list[RecordedRequest], wanted: Wanted, lora: LoRARequest | None) -> list[Part]:
    # The last token is generated again, and no other one can be: an answer may fill the whole context.
    prompts = [{"prompt_token_ids": [*one.request.prompt_token_ids, *one.token_ids[:-1]]} for one in parts]
    params = [
        SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=wanted.num_top, logprobs=wanted.num_top,
            allowed_token_ids=[one.token_ids[-1]],
        )
        for one in parts
    ]  # fmt: skip
    record = import_module(_ROUTING).recorded_routing() if wanted.has_routing else nullcontext({})
    with record as layer_to_choices:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
    found = [
        _described(one, [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())])
        for one, output in zip(parts, outputs, strict=True)
    ]
    for part, prompt in zip(found, prompts, strict=True):
        if wanted.has_routing:
            part["routing"] = _routing(layer_to_choices, len(prompt["prompt_token_ids"]))
    return found


def _routing(layer_to_choices: Mapping[str, list[Any]], num_tokens: int) -> Routing:
    """The choices of all steps, layer by layer."""
    layers = [[row for step in steps for row in step.tolist()] for steps in layer_to_choices.values()]
    if not layers:
        raise LogprobsError("its model has no layers of experts, or none whose choices can be recorded")
    if any(len(rows) != num_tokens for rows in layers) or len({len(rows[0]) for rows in layers}) > 1:
        raise LogprobsError("its layers choose different numbers of experts, or not for each token")
    flat = array("H", [expert for place in zip(*layers, strict=True) for choices in place for expert in choices])
    if sys.byteorder == "big":
        flat.byteswap()
    return {
        "layers": list(layer_to_choices), "num_tokens": num_tokens, "num_choices": len(layers[0][0]),
        "expert_ids": b64encode(flat.tobytes()).decode(),
    }  # fmt: skip


def _constraints(llm: LLM) -> LazyBackend:
    engine = llm.llm_engine
    folder = engine.model_config.tokenizer_path
    return LazyBackend(CONSTRAINT_BACKEND, None if folder is None else str(folder), engine.ready.vocab_size)


def _with_masks(part: Part, masks: list[bytes]) -> Part:
    for place, mask in zip(part["tokens"], masks, strict=True):
        place["mask"] = b64encode(mask).decode()
    return part


def _adapter_of(parts: list[RecordedRequest], folder: Path | None) -> LoRARequest | None:
    name = parts[0].request.lora_name
    if name is None:
        if folder is not None:
            raise LogprobsError("no adapter was used, so --adapter must not be given")
        return None
    identity = LoRAIdentity.parse(name)
    if folder is None:
        raise LogprobsError(f"the adapter {identity.name!r} was used: give its folder by --adapter")
    digest = adapter_digest(folder, MAX_ADAPTER_BYTES)
    if digest != identity.digest:
        raise LogprobsError(f"the adapter's digest is {identity.digest} in the log, and {digest} here")
    return LoRARequest(identity.name, 1, str(folder))


def _check_numerics(header: LogHeader, recorded: RecordedRequest, ready: EngineReady) -> None:
    numerics = header.numerics if recorded.numerics is None else recorded.numerics
    if not numerics:
        raise LogprobsError("the log does not say how its numbers were computed")
    contract = str(numerics["backends"].get("numeric_contract", ""))
    if not contract.startswith("holds"):
        raise LogprobsError(f"equal bits are {contract}, so they depend on what ran beside it")
    found = other_numerics(numerics["numeric_contract"], numerics["backends"], ready, "the log")
    if found is not None:
        raise LogprobsError(f"the computation differs: {found}")


def _described(recorded: RecordedRequest, positions: list[dict[int, Logprob] | None]) -> Part:
    request = recorded.request
    places = positions[len(request.prompt_token_ids) :]
    return {
        "request": request.request_id,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "tokens": [
            {
                "token_id": token_id,
                "logprob": place[token_id].logprob,
                "top": {str(other): found.logprob for other, found in place.items()},
            }
            for token_id, place in zip(recorded.token_ids, places, strict=True)
            if place is not None
        ],
    }
