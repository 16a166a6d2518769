"""`llmstack verify`: computes the tokens of a receipt again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from llmstack_engine_core.contract import NOT_NUMERIC
from llmstack_llm import LLM, LoRARequest
from llmstack_llm.engine_args import EngineArgsError
from llmstack_model_files import adapter_digest
from llmstack_server.web.receipts import ADAPTER_SETTINGS, SETTINGS, VERSION, ReceiptError
from llmstack_types import EngineReady, LLMStackError, SamplingParams, StructuredOutputsParams
from llmstack_types.json_values import JSONValue
from llmstack_types.sampling_params import RepetitionDetectionParams

MAX_RECEIPT_BYTES = 256 << 20
MAX_ADAPTER_BYTES = 1 << 40  # it is the user's own; read in pieces


def read_receipt(path: Path) -> dict[str, object]:
    """The receipt in a file, alone or in an answer.

    Raises:
        ReceiptError: There is none of this version.
    """
    try:
        if path.stat().st_size > MAX_RECEIPT_BYTES:
            raise ReceiptError(f"{path}: it is larger than {MAX_RECEIPT_BYTES} bytes")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise ReceiptError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ReceiptError(f"{path}: it is not JSON") from None
    receipt = document.get("receipt", document) if isinstance(document, dict) else None
    if isinstance(receipt, dict) and isinstance(receipt.get("missing"), str):
        raise ReceiptError(f"{path}: the answer has no receipt. {receipt['missing']}")
    if isinstance(document, dict) and isinstance(document.get("receipts"), list):
        raise ReceiptError(f"{path}: it has a list of receipts; give a file with one of them")
    if not isinstance(receipt, dict) or not isinstance(receipt.get("completions"), list):
        raise ReceiptError(f"{path}: it holds no receipt")
    if receipt.get("version") != VERSION:
        raise ReceiptError(f"{path}: its version is {receipt.get('version')}, and this command reads {VERSION}")
    return receipt


def reloads_of(receipt: Mapping[str, JSONValue]) -> list[str]:
    """Sentences on the reloads during the answer.

    Raises:
        ReceiptError: They are malformed.
    """
    try:
        return [
            f"after a reload it went on in another engine core: {one['weights_name']}"
            for one in receipt.get("moved_to", ())
        ]
    except (KeyError, TypeError) as error:
        raise ReceiptError(f"it is malformed: {type(error).__name__}") from error


def verify(receipt: Mapping[str, object], model: str, adapter: Path | None = None) -> list[str]:
    """Computes the tokens again; sentences that name the first difference of each completion, none if all are equal.

    `adapter`: The folder of the adapter that the receipt names.

    Raises:
        ReceiptError: It cannot be computed again; the text says why.
    """
    try:
        return _verify(receipt, model, adapter)
    except (EngineArgsError, LLMStackError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReceiptError(f"it is malformed: {type(error).__name__}") from error


def _verify(receipt: Mapping[str, JSONValue], model: str, adapter: Path | None) -> list[str]:
    completions, has_adapter = receipt["completions"], receipt.get("adapter") is not None
    if not set(receipt["settings"]) <= {*SETTINGS, *(ADAPTER_SETTINGS if has_adapter else ())}:
        raise ReceiptError("it has settings that this command does not know")
    if not all("prompt_token_ids" in one and "token_ids" in one for one in completions):
        raise ReceiptError("it has no token ids to compute again: ask for them with return_token_ids")
    other_adapter = _other_adapter(receipt, adapter)
    options: dict[str, Any] = {}
    lora: LoRARequest | None = None
    if adapter is not None:
        options = {"enable_lora": True, "max_lora_bytes": sum(file.stat().st_size for file in adapter.iterdir())}
        lora = LoRARequest("adapter", 1, str(adapter))
    with LLM(model, digests_weight_content=True, **options, **receipt["settings"]) as llm:
        numerics, tokens = [*_other_numerics(receipt, llm.llm_engine.ready), *other_adapter], []
        for prompt_index in sorted({one["prompt"] for one in completions}):
            tokens += _other_tokens([one for one in completions if one["prompt"] == prompt_index], llm, lora)
        return [*numerics, *(tokens or ["all tokens are equal nevertheless"])] if numerics else tokens


def _other_adapter(receipt: Mapping[str, object], folder: Path | None) -> list[str]:
    """How the adapter in a folder differs from that of the receipt.

    Raises:
        ReceiptError: Only one of them has an adapter.
        ModelFilesError: The folder has none.
    """
    name = receipt.get("adapter")
    if name is None:
        if folder is not None:
            raise ReceiptError("no adapter was used, so --adapter must not be given")
        return []
    if folder is None:
        raise ReceiptError(f"the adapter {name!r} was used: give its folder by --adapter")
    if "adapter_digest" not in receipt:
        raise ReceiptError("it has no digest of its adapter, so only its signature can be checked (--signature-only)")
    ours = adapter_digest(folder, MAX_ADAPTER_BYTES)
    if ours == receipt["adapter_digest"]:
        return []
    return [
        f"the computation differs: the adapter's digest is {receipt['adapter_digest']} in the receipt, and {ours} here"
    ]


def _other_numerics(receipt: Mapping[str, JSONValue], ready: EngineReady) -> list[str]:
    theirs, ours = receipt["backends"], ready.backends
    if receipt["weights"] != ours.get("weights", ""):  # whatever the contract says
        return [
            f"the computation differs: weights is {receipt['weights']} in the receipt, and {ours.get('weights')} here"
        ]
    for one in receipt.get("moved_to", ()):
        if (one["weights"], one["numeric_contract"]) != (receipt["weights"], receipt["numeric_contract"]):
            return ["the computation differs: after a reload it went on with other weights or another numeric contract"]
    found = other_numerics(receipt["numeric_contract"], theirs, ready, "the receipt")
    return [] if found is None else [f"the computation differs: {found}"]


def other_numerics(contract_id: str, backends: Mapping[str, object], ready: EngineReady, where: str) -> str | None:
    """How the numerics of an engine core differ from recorded ones; None if both compute equal bits.

    `where`: What has recorded them.
    """
    if contract_id == ready.numeric_contract_id:
        return None
    ours = ready.backends
    for name in sorted({*backends, *ours} - set(NOT_NUMERIC)):
        one, other = backends.get(name, "none"), ours.get(name, "none")
        if one != other:
            return f"{name} is {one} in {where}, and {other} here"
    return (
        f"the numeric contract id is {contract_id or 'none'} in {where}, and {ready.numeric_contract_id or 'none'} "
        "here. Only equal ids guarantee equal tokens. Weights, kernels and versions are the same, so a data type, the "
        f"quantization or an override of the model is another one, or the id in {where} is wrong"
    )


def _other_tokens(completions: Sequence[Mapping[str, JSONValue]], llm: LLM, lora: LoRARequest | None) -> list[str]:
    """The differences of the completions of one prompt."""
    first = completions[0]
    prompt = {"prompt_token_ids": first["prompt_token_ids"]}
    params = _params_of(first["sampling"])
    outputs = llm.generate([prompt], params, use_tqdm=False, lora_request=lora)[0].outputs
    found = []
    for one in completions:
        where = f"prompt {one['prompt']}, completion {one['index']}"
        if one["index"] >= len(outputs):
            found.append(f"{where}: it does not exist here")
            continue
        pairs = zip_longest(one["token_ids"], outputs[one["index"]].token_ids)
        for number, (theirs, ours) in enumerate(pairs):
            if theirs != ours:
                found.append(f"{where}: token {number} is {theirs} in the receipt, and {ours} here")
                break
    return found


def _params_of(sampling: Mapping[str, JSONValue]) -> SamplingParams:
    """Raises ReceiptError for parameters that only a server can have."""
    fields = dict(sampling)
    if fields.get("thinking_tags") is not None:
        raise ReceiptError("it has a budget for reasoning, which this command does not apply")
    nested = {"structured_outputs": StructuredOutputsParams, "repetition_detection": RepetitionDetectionParams}
    for name, kind in nested.items():
        if fields.get(name) is not None:
            fields[name] = kind(**fields[name])
    if fields.get("logit_bias"):
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    return SamplingParams(**fields)
