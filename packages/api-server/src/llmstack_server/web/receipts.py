"""Receipts: signed statements of what has computed an answer."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import importlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack_server.options.errors import ServeError
from llmstack_server.state.answer_source import AnswerSource
from llmstack_server.state.repeated_outputs import RepeatedOutputs
from llmstack_server.state.server_state import OutputStream, Sign
from llmstack_types import EngineReady, LoRAIdentity, SamplingParams
from llmstack_types.json_values import JSONObject, JSONValue

if TYPE_CHECKING:
    from llmstack_llm.requests import Adapter
    from llmstack_server.state.server_state import ServerState

VERSION = 1
MAX_KEY_BYTES = 4096
# Not signed: the signature itself, and token ids, whose digests are.
UNSIGNED_FIELDS = frozenset({"signature"})
# Options on which tokens may depend. Only these are taken from a receipt.
SETTINGS = (
    "dtype", "kv_cache_dtype", "max_model_len", "block_size", "quantization", "gguf_activations",
    "enable_deterministic_inference",
)  # fmt: skip
# The same, for answers with an adapter.
ADAPTER_SETTINGS = ("max_lora_rank",)
TOKEN_FIELDS = frozenset({"prompt_token_ids", "token_ids"})
MIXED_WEIGHTS = "A reload came between the prompts of this request, so different weights have computed them."
_OTHERS = 0o077
_DEFAULTS = SamplingParams()
# Without those that say how the answer is sent, and the one that every receipt has.
_SAMPLING_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("output_kind", "stream_interval", "max_tokens")
)


class ReceiptError(Exception):
    """A receipt or a key cannot be used; the text is one sentence."""


class ReceiptSigner:
    """Signs with one Ed25519 key.

    Attributes:
        public_key: The key that verifies its signatures, in base64.
    """

    def __init__(self, pem: bytes) -> None:
        """Raises ReceiptError for anything but an Ed25519 key in PEM without a password."""
        serialization, ed25519 = _crypto("serialization"), _crypto("asymmetric.ed25519")
        try:
            self._key: Any = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise ReceiptError("it holds no private key in PEM without a password") from error
        if not isinstance(self._key, ed25519.Ed25519PrivateKey):
            raise ReceiptError("its key is not one of Ed25519")
        raw = self._key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.public_key = base64.b64encode(raw).decode()

    def note(self, state: ServerState, outputs: OutputStream) -> tuple[RepeatedOutputs, Sign]:
        """The outputs with the source of their answer, and what makes the receipt of it."""
        noted = outputs if isinstance(outputs, RepeatedOutputs) else RepeatedOutputs(outputs, AnswerSource())
        return noted, partial(self.receipt, state, noted)

    def receipt(
        self, state: ServerState, outputs: RepeatedOutputs, answer_id: str, model: str, created: int, *,
        has_token_ids: bool = False,
    ) -> JSONObject:  # fmt: skip
        """The signed receipt of an answer, once all outputs are read; `created` is in seconds since 1970.

        It names the weights that have computed the answer, whatever the server has loaded since. Where there is no such
        receipt, the result is an object with the reason in `missing`.

        `has_token_ids`: Whether the client has asked for them.
        """
        first, *others = _computations(state, outputs)
        if any(_bits_of(one) != _bits_of(first) for one in others):
            return {"version": VERSION, "answer": answer_id, "missing": MIXED_WEIGHTS}
        receipt = {
            "version": VERSION,
            "answer": answer_id,
            "model": model,
            "created": created,
            **first,
            **_adapter_fields(outputs.prompts[0].adapter),
            **({"moved_to": others} if others else {}),
            "completions": _completions(outputs, has_token_ids=has_token_ids),
        }
        return self.signed(receipt)

    def signed(self, receipt: JSONObject) -> JSONObject:
        """The receipt with the public key and the signature."""
        receipt = receipt | {"public_key": self.public_key}
        signature = self._key.sign(signed_bytes(receipt))
        return receipt | {"signature": base64.b64encode(signature).decode()}


def open_signer(path: str) -> ReceiptSigner:
    """The key in a file that other users cannot read.

    Raises:
        ServeError: It cannot be used; the text is one sentence that names the file.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & _OTHERS:
                raise ServeError(
                    f"--receipts {path}: it must be a regular file that other users cannot read (chmod 600)"
                )
            return ReceiptSigner(file.read(MAX_KEY_BYTES))
    except OSError as error:
        raise ServeError(f"--receipts {path}: {error.strerror}") from None
    except ReceiptError as error:
        raise ServeError(f"--receipts {path}: {error}") from None


def make_key(path: Path) -> str:
    """Writes a new private key for its owner alone, and returns the public one; never overwrites.

    Raises:
        ReceiptError: The file exists or cannot be written.
    """
    serialization, ed25519 = _crypto("serialization"), _crypto("asymmetric.ed25519")
    pem = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ReceiptError(f"{path}: {error.strerror}") from None
    with open(descriptor, "wb") as file:
        file.write(pem)
    return ReceiptSigner(pem).public_key


def check_signature(receipt: Mapping[str, JSONValue]) -> None:
    """Returns if the signature fits the receipt and its own public key.

    Raises:
        ReceiptError: It does not, or the token ids do not fit their digests.
    """
    ed25519, exceptions = _crypto("asymmetric.ed25519"), importlib.import_module("cryptography.exceptions")
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(base64.b64decode(receipt["public_key"], validate=True))
        key.verify(base64.b64decode(receipt["signature"], validate=True), signed_bytes(receipt))
    except exceptions.InvalidSignature:
        raise ReceiptError("the signature does not fit: the receipt or its key was changed") from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ReceiptError("it has no valid public key and signature") from None
    for number, one in enumerate(receipt["completions"]):
        for name in TOKEN_FIELDS & set(one):
            if not isinstance(one[name], list):
                raise ReceiptError(f"completion {number}: {name} is not a list")
            if digest_of(one[name]) != one.get(name.replace("_ids", "s_sha256")):
                raise ReceiptError(f"completion {number}: the digest of {name} is another one")


def signed_bytes(receipt: Mapping[str, JSONValue]) -> bytes:
    """The bytes to sign: canonical JSON of all but the signature and the token ids."""
    signed = {name: value for name, value in receipt.items() if name not in UNSIGNED_FIELDS}
    signed["completions"] = [
        {name: value for name, value in one.items() if name not in TOKEN_FIELDS} for one in receipt["completions"]
    ]
    return json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()


def digest_of(token_ids: Sequence[int]) -> str:
    """SHA-256 of token ids, as decimal numbers with commas between them."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def sampling_object(params: SamplingParams) -> JSONObject:
    """The parameters that differ from the defaults, as JSON."""
    given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(params, name)) != getattr(_DEFAULTS, name)}
    fields: JSONObject = json.loads(json.dumps(given, default=_plain))  # of the others it would take 0.2 ms
    defaults = json.loads(json.dumps({name: getattr(_DEFAULTS, name) for name in given}, default=_plain))
    return {name: value for name, value in fields.items() if value != defaults[name]} | {
        "max_tokens": params.max_tokens
    }


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.value if isinstance(value, Enum) else dict(value) if isinstance(value, Mapping) else str(value)


def _crypto(name: str) -> Any:
    try:
        return importlib.import_module(f"cryptography.hazmat.primitives.{name}")
    except ImportError:
        raise ReceiptError("receipts need the package cryptography: install llmstack-server[receipts]") from None


def _computations(state: ServerState, outputs: RepeatedOutputs) -> list[JSONObject]:
    """The computations behind the answer, each once, in order; without any tokens, the one that would follow."""
    found: list[JSONObject] = []
    adapter = outputs.prompts[0].adapter
    engines: list[EngineReady | None] = [one for _, engines in sorted(outputs.engines.items()) for one in engines]
    for ready in engines or [state.ready]:
        computation = _computation_of(state, ready, has_adapter=adapter is not None)
        if computation not in found:
            found.append(computation)
    return found


def _completions(outputs: RepeatedOutputs, *, has_token_ids: bool) -> list[JSONObject]:
    found = []
    for (prompt_index, index), token_ids in sorted(outputs.source.token_ids().items()):
        prompt = outputs.prompts[prompt_index]
        one: JSONObject = {
            "prompt": prompt_index,
            "index": index,
            "sampling": sampling_object(prompt.sampling_params),
            "num_prompt_tokens": len(prompt.prompt_token_ids),
            "prompt_tokens_sha256": digest_of(prompt.prompt_token_ids),
            "num_tokens": len(token_ids),
            "tokens_sha256": digest_of(token_ids),
        }
        if has_token_ids:
            one |= {"prompt_token_ids": list(prompt.prompt_token_ids), "token_ids": token_ids}
        found.append(one)
    return found


def _adapter_fields(adapter: Adapter | None) -> JSONObject:
    """The name and the digest of the adapter of a request; all of its prompts have the same."""
    if adapter is None:
        return {"adapter": None}
    return {"adapter": adapter.name, "adapter_digest": LoRAIdentity.parse(adapter.identity).digest}


def _computation_of(state: ServerState, ready: EngineReady | None, *, has_adapter: bool) -> JSONObject:
    """The fields of a receipt about weights, kernels and settings of an engine core."""
    backends = {} if ready is None else dict(ready.backends)
    found = {
        "weights": backends.get("weights", ""),
        "numeric_contract": "" if ready is None else ready.numeric_contract_id,
        "backends": backends,
        "settings": _settings_of(state, ready, ADAPTER_SETTINGS if has_adapter else ()),
    }
    if ready is not None and state.config.reload.changes_weights:
        found["weights_name"] = ready.weights_name
    return found


def _bits_of(computation: Mapping[str, JSONValue]) -> tuple[str, str]:
    """Equal where two engine cores compute equal bits."""
    return computation["weights"], computation["numeric_contract"]


def _settings_of(state: ServerState, ready: EngineReady | None, others: Sequence[str]) -> JSONObject:
    """The settings that an engine needs to compute an answer once more, `others` among them."""
    found = {name: getattr(state.config.engine, name) for name in (*SETTINGS, *others)}
    if ready is not None:
        entry = state.config.reload.entries.get(ready.weights_name)
        given = {} if entry is None else entry.settings
        found |= {name: value for name, value in given.items() if name in SETTINGS}
        found |= {"dtype": ready.dtype, "max_model_len": ready.max_model_len}
    return {name: value for name, value in found.items() if value is not None}
