"""`POST /infill`: text for a gap, in llama.cpp's form."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from llmstack_llm import CompletionOutput, GivenSampling, RequestMetrics
from llmstack_server.apis.llama_cpp.line_limits import LineLimits
from llmstack_server.apis.llama_cpp.prompt import gap_prompt
from llmstack_server.apis.llama_cpp.protocol import FIELDS, InfillRequest, check_response_fields, own_fields
from llmstack_server.apis.llama_cpp.samplers import sampler_fields
from llmstack_server.chat.logprobs import Position, floor
from llmstack_server.state.server_state import OutputStream, ServerState
from llmstack_server.web.answers import Answer, new_id
from llmstack_server.web.checks import check_fields
from llmstack_server.web.fields import parse
from llmstack_server.web.pauses import collected, encoded
from llmstack_server.web.sampling import given_sampling
from llmstack_server.web.sse import encode_json, frame
from llmstack_server.web.submission import submit_prompts
from llmstack_server.web.usage import UsageCounter
from llmstack_types.json_values import JSONObject

_NAMES: Final[Mapping[str, str]] = {
    "max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs", "n": "n_cmpl",
    "extra_args": "vllm_xargs", "infill": "samplers",
}  # fmt: skip
_MS_PER_S: Final = 1000.0


async def prepare_infill(state: ServerState, body: JSONObject) -> InfillAnswer:
    """Checks a request, puts its prompt together and submits it.

    Raises:
        InvalidRequestError: Names the first invalid field.
        ServerOverloadedError: Too many requests are waiting.
    """
    fields = parse(InfillRequest, body)
    check_fields(state, body, fields, FIELDS)
    check_response_fields(fields.response_fields)
    given, names = given_sampling(fields, _NAMES)
    given |= own_fields(fields)
    if fields.samplers is not None and fields.n_predict != 0:  # of 0 no token is drawn
        given |= sampler_fields(fields.samplers, state.engine.check_sampling(given, names).values)
    prompt = await gap_prompt(state, fields)
    given["stop_token_ids"] = [*(given.get("stop_token_ids") or ()), *prompt.end_ids]
    has_prompt = fields.response_fields is None or "prompt" in fields.response_fields
    text = await state.engine.detokenize(prompt.token_ids) if has_prompt else ""
    outputs = await submit_prompts(
        state, [(prompt.token_ids, "input_prefix")], GivenSampling(given, names), new_id("infill"),
        model=fields.model, priority=fields.priority or 0, cache_salt=fields.cache_salt or "",
    )  # fmt: skip
    return InfillAnswer(state, fields, outputs, text)


class _Text:
    """One of the texts for a gap: what came of it.

    Attributes:
        last: Its last output; None before the first.
        limits: What may end it before the engine does.
    """

    def __init__(self, index: int, fields: InfillRequest) -> None:
        self.index = index
        self.content = ""
        self.token_ids: list[int] = []
        self.positions: list[Position] = []
        self.last: CompletionOutput | None = None
        self.limits = LineLimits(fields.n_indent or 0, fields.t_max_predict_ms or 0)

    def take(self, new: CompletionOutput, elapsed_ms: float) -> CompletionOutput:
        """The part of a new output that belongs to it."""
        text = self.limits.take(new.text, elapsed_ms)
        self.last = new if text == new.text else replace(new, text=text)
        self.content += text
        self.token_ids += new.token_ids
        self.positions += new.logprobs or ()
        return self.last

    def ending(self) -> tuple[str, str]:
        """The reason of its end in llama.cpp's words, and the stop string; `none` of one that was aborted."""
        finish_reason = "length" if self.limits.is_over or self.last is None else self.last.finish_reason
        if finish_reason != "stop":
            return "none" if finish_reason == "abort" else "limit", ""
        reason = None if self.last is None else self.last.stop_reason
        return ("word", reason) if isinstance(reason, str) else ("eos", "")


class InfillAnswer(Answer):
    """The answer to one request. The last event of each text of a stream has what a whole answer has, but the text."""

    end = b""

    def __init__(self, state: ServerState, fields: InfillRequest, outputs: OutputStream, prompt: str) -> None:
        """`prompt`: The text of the whole prompt, if the answer is to have it."""
        self.is_stream = bool(fields.stream)
        self._state, self._fields, self._outputs = state, fields, outputs
        self._prompt = prompt
        self._usage = UsageCounter(outputs.prompts)
        self._texts = [_Text(index, fields) for index in range(outputs.prompts[0].sampling_params.n)]
        self._is_empty = fields.n_predict == 0

    async def whole(self) -> list[bytes]:
        """The object with all text; of several texts an array of them."""
        async for _ in self._news():
            pass
        objects = [await self._whole(text) for text in self._texts]
        return await encoded(objects[0] if len(objects) == 1 else objects)

    async def _whole(self, text: _Text) -> JSONObject:
        shown = text.token_ids if self._fields.return_tokens else []
        num_top, probabilities = self._fields.n_probs, JSONObject()
        if num_top:
            entries = _probabilities(text.token_ids, text.positions, num_top)
            probabilities["completion_probabilities"] = await collected(entries)
        return self._chosen({"content": text.content, "tokens": shown, **self._end(text), **probabilities})

    async def events(self) -> AsyncIterator[bytes]:
        """An event for each new text, and one with the end of each text."""
        async for text, new in self._news():
            if new.text or new.token_ids:
                yield frame(encode_json(self._part(text, new)))
        for text in self._texts:
            yield frame(encode_json(self._chosen({"content": "", "tokens": [], **self._end(text)})))

    async def _news(self) -> AsyncIterator[tuple[_Text, CompletionOutput]]:
        async with self._outputs as outputs:
            async for output in outputs:
                self._usage.add(output)
                for new in output.outputs:
                    text = self._texts[new.index]
                    if not (self._is_empty or text.limits.is_over):
                        yield text, text.take(new, _answer_ms(output.metrics))
                if all(text.limits.is_over for text in self._texts):
                    return

    def _part(self, text: _Text, new: CompletionOutput) -> JSONObject:
        part = {"index": text.index, "content": new.text, "tokens": list(new.token_ids), "stop": False}
        return {**part, **self._counts(text), **self._probabilities(new.token_ids, new.logprobs or ())}

    def _probabilities(self, token_ids: Sequence[int], positions: Sequence[Position]) -> JSONObject:
        if not self._fields.n_probs:
            return {}
        return {"completion_probabilities": list(_probabilities(token_ids, positions, self._fields.n_probs))}

    def _counts(self, text: _Text) -> dict[str, int]:
        return {"tokens_predicted": len(text.token_ids), "tokens_evaluated": self._usage.num_prompt_tokens}

    def _end(self, text: _Text) -> JSONObject:
        params = self._outputs.prompts[0].sampling_params
        stop_type, word = text.ending()
        model = self._fields.model or self._state.served_model_name
        cached = self._usage.as_object()["prompt_tokens_details"]["cached_tokens"]
        return {
            "index": text.index, "stop": True, "model": model, **self._counts(text), "prompt": self._prompt,
            "stop_type": stop_type, "stopping_word": word, "truncated": False, "tokens_cached": cached,
            "generation_settings": {
                "n_ctx": self._state.engine.limits.max_model_len, "model": model,
                "n_predict": 0 if self._is_empty else params.max_tokens, "seed": params.seed,
                "temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p,
                "typical_p": params.typical_p, "repeat_penalty": params.repetition_penalty,
                "presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty,
                "stop": list(params.stop or ()), "ignore_eos": params.ignore_eos, "n_probs": params.logprobs or 0,
            },
            "timings": _timings(self._usage, cached, len(text.token_ids)),
        }  # fmt: skip

    def _chosen(self, whole: JSONObject) -> JSONObject:
        """The fields that the client wants, under the names that it gives; unknown ones are left out."""
        if self._fields.response_fields is None:
            return whole
        chosen = {}
        for path in self._fields.response_fields:
            value: object = whole
            for name in path.split("/"):
                if not isinstance(value, dict) or name not in value:
                    break
                value = value[name]
            else:
                chosen[path] = value
        return chosen


def _probabilities(token_ids: Sequence[int], positions: Sequence[Position], num_top: int) -> Iterator[JSONObject]:
    """llama.cpp's objects of log-probabilities, each with the likeliest tokens of its place."""
    for token_id, position in zip(token_ids, positions, strict=True):
        best = sorted(position, key=lambda one: -position[one].logprob)[:num_top]
        yield {**_entry(token_id, position), "top_logprobs": [_entry(one, position) for one in best]}


def _entry(token_id: int, position: Position) -> JSONObject:
    entry = position[token_id]
    text = entry.decoded_token or ""
    raw = text.encode() if entry.token_bytes is None else entry.token_bytes
    return {"id": token_id, "token": text, "bytes": list(raw), "logprob": floor(entry.logprob)}


def _timings(usage: UsageCounter, num_cached: int, num_predicted: int) -> dict[str, float | int]:
    """Milliseconds of the prompt and of the answer, and their rates; 0 where they are not known."""
    timings = usage.timings
    first_ms, answer_ms = _prompt_ms(timings), _answer_ms(timings)
    num_computed = usage.num_prompt_tokens - num_cached
    return {
        "cache_n": num_cached, "prompt_n": num_computed, "prompt_ms": first_ms,
        "prompt_per_token_ms": _ratio(first_ms, num_computed),
        "prompt_per_second": _ratio(num_computed * _MS_PER_S, first_ms),
        "predicted_n": num_predicted, "predicted_ms": answer_ms,
        "predicted_per_token_ms": _ratio(answer_ms, num_predicted),
        "predicted_per_second": _ratio(num_predicted * _MS_PER_S, answer_ms),
    }  # fmt: skip


def _prompt_ms(timings: RequestMetrics | None) -> float:
    return 0.0 if timings is None else _ms(timings.scheduled_time_s, timings.first_token_time_s)


def _answer_ms(timings: RequestMetrics | None) -> float:
    return 0.0 if timings is None else _ms(timings.first_token_time_s, timings.last_token_time_s)


def _ms(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else round(_MS_PER_S * (end_s - start_s), 3)


def _ratio(above: float, below: float) -> float:
    return round(above / below, 3) if below else 0.0
