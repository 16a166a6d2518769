"""An engine core goes on from a prompt that another one has computed, and no token differs from one that does both."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import save_file
from two_machines import FIRST, Namespaces

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_engine_core.ipc.keys import make_key_file
from llmstack_engine_core.kv_transfer.config import KVTransferConfig, TransferLimits, TransferNetwork
from llmstack_engine_core.kv_transfer.request_transfers import RequestTransfers
from llmstack_engine_core.protocols import KVTransfer
from llmstack_step_log import read_step_log
from llmstack_step_log.replay import verify
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVTransferParams,
    ModelRunnerConfig,
    SamplingParams,
)

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="needs NIXL: llmstack-engine-core[nixl]"
)
VOCAB_SIZE = 97
BLOCK_SIZE = 16
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LAYER_SHAPES: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (64, 32), "self_attn.k_proj": (32, 32), "self_attn.v_proj": (32, 32),
    "self_attn.o_proj": (32, 64), "mlp.gate_proj": (56, 32), "mlp.up_proj": (56, 32), "mlp.down_proj": (32, 56),
    "input_layernorm": (32,), "post_attention_layernorm": (32,),
}  # fmt: skip
LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
PROMPT = [(7 * i + 3) % VOCAB_SIZE for i in range(100)]
NUM_EXPORTED_TOKENS = 96
ASK = KVTransferParams(do_remote_decode=True)
NUM_TOKENS = 12
MAX_STEPS = 2000


def write_checkpoint(folder: Path, seed: int) -> Path:
    """Weights large enough for wrong keys or values to change the tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens": (VOCAB_SIZE, 32), "lm_head": (VOCAB_SIZE, 32), "model.norm": (32,)}
    for layer in range(2):
        for name, shape in LAYER_SHAPES.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.2 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), 1)


def build(folder: Path, role: str | None, log: Path | None = None, num_blocks: int = 64, **changes: Any) -> EngineCore:
    key_file = changes.pop("key_file", None)
    connector = "SharedMemoryConnector" if key_file is None else "NixlConnector"
    limits = TransferLimits(import_timeout_s=changes.pop("import_timeout_s", 300.0))
    model = ModelRunnerConfig(str(folder), device="cpu", enforce_eager=True, **LIMITS, **changes.pop("model", {}))
    config = EngineConfig(
        model,
        scheduler=SchedulerConfig(**LIMITS),
        num_blocks=num_blocks,
        record_steps=None if log is None else str(log),
        kv_transfer=None if role is None else KVTransferConfig(connector, role, kv_connector_extra_config=limits),
        kv_transfer_network=None if key_file is None else TransferNetwork("lo", str(key_file)),
        **changes,
    )
    return build_engine_core(config)


def request(name: str, max_tokens: int, prompt: list[int] = PROMPT, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=7, ignore_eos=True)
    return EngineCoreRequest(name, list(prompt), params, **fields)


def transfer_of(core: EngineCore) -> KVTransfer:
    transfers = core.stages.transfers
    assert isinstance(transfers, RequestTransfers)
    return transfers._transfer


def run(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[EngineCoreOutput]]:
    """All outputs of the requests, each of which has to end."""
    outputs: dict[str, list[EngineCoreOutput]] = {one.request_id: [] for one in requests}
    for one in requests:
        core.add_request(one)
    for _ in range(MAX_STEPS):
        if not core.has_unfinished_requests():
            return outputs
        for output in core.step().outputs:
            outputs[output.request_id].append(output)
    raise AssertionError("the requests did not end")


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    assert outputs[-1].finish_reason is FinishReason.LENGTH, outputs[-1].error
    return [token_id for output in outputs for token_id in output.new_token_ids]


def prefill(core: EngineCore, name: str = "prefill", prompt: list[int] = PROMPT, **fields: Any) -> KVTransferParams:
    last = run(core, request(name, 1, prompt, kv_transfer=ASK, **fields))[name][-1]
    assert last.kv_transfer is not None
    return last.kv_transfer


class Pair:
    """A prefill and a decode engine, and what one engine that does both generates."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.logs = [logs / "prefill", logs / "decode"]
        self.producer = build(folder, "kv_producer", self.logs[0])
        self.consumer = build(folder, "kv_consumer", self.logs[1])
        alone = build(folder, None)
        self.expected = tokens(run(alone, request("alone", NUM_TOKENS))["alone"])
        alone.shutdown()

    def decode(self, params: KVTransferParams, **fields: Any) -> tuple[list[int], int]:
        """The tokens of the decode engine, and how many of the prompt it did not compute; its cache is empty before."""
        assert self.consumer.reset_prefix_cache()
        outputs = run(self.consumer, request("decode", NUM_TOKENS, kv_transfer=params, **fields))["decode"]
        return tokens(outputs), outputs[0].num_cached_tokens


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    one = Pair(checkpoint, tmp_path_factory.mktemp("logs"))
    yield one
    for core, log in zip((one.producer, one.consumer), one.logs, strict=True):
        core.shutdown()
        assert verify(read_step_log(log)).num_steps > 0  # every decision follows from the log, imports included


def test_a_prompt_computed_elsewhere_gives_the_tokens_of_one_engine(pair: Pair) -> None:
    params = prefill(pair.producer)
    assert (params.do_remote_prefill, params.num_tokens) == (True, NUM_EXPORTED_TOKENS)
    assert pair.decode(params) == (pair.expected, NUM_EXPORTED_TOKENS)


def test_latents_are_imported_as_keys_and_values_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=56, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=1, n_routed_experts=8, n_group=4,
        topk_group=2, num_experts_per_tok=3, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, initializer_range=0.3, max_position_embeddings=512,
    )  # fmt: skip
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(tmp_path / "model")
    pair = Pair(tmp_path / "model", tmp_path)
    assert pair.decode(prefill(pair.producer)) == (pair.expected, NUM_EXPORTED_TOKENS)
    for core, log in zip((pair.producer, pair.consumer), pair.logs, strict=True):
        core.shutdown()
        assert verify(read_step_log(log)).num_steps > 0


def test_the_first_output_says_how_many_tokens_were_imported(pair: Pair) -> None:
    params = prefill(pair.producer)
    assert pair.consumer.reset_prefix_cache()
    run(pair.consumer, request("warm", 1, PROMPT[:40]))
    for expected in (NUM_EXPORTED_TOKENS - 32, 0):  # less what the cache had; the second one finds no export
        first, *others = run(pair.consumer, request("decode", 3, kv_transfer=params))["decode"]
        assert first.kv_transfer == KVTransferParams(do_remote_prefill=True, num_tokens=expected)
        assert {output.kv_transfer for output in others} == {None}


def test_the_second_of_two_requests_with_one_handle_is_computed(pair: Pair) -> None:
    params = prefill(pair.producer)
    assert pair.decode(params)[1] == NUM_EXPORTED_TOKENS
    assert pair.decode(params) == (pair.expected, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"transfer_id": "0" * 32},
        {"transfer_id": ""},
        {"remote_engine_id": "0" * 32},
        {"remote_engine_id": ""},
        {"remote_engine_id": "../engine"},
        {"num_tokens": 80},
        {"num_tokens": 112},
        {"num_tokens": 1},
        {"num_tokens": 2**31 - 1},
    ],
)
def test_parameters_that_name_no_export_change_no_token(pair: Pair, wrong: dict[str, Any]) -> None:
    assert pair.decode(prefill(pair.producer)._replace(**wrong)) == (pair.expected, 0)


@pytest.mark.parametrize("fields", [{"tenant": "b"}, {"tenant": ""}, {"cache_salt": "y"}, {"cache_salt": ""}])
def test_the_export_of_one_tenant_or_salt_is_never_imported_by_another(pair: Pair, fields: dict[str, str]) -> None:
    owner = {"tenant": "a", "cache_salt": "x"}
    params = prefill(pair.producer, **owner)
    assert pair.decode(params, **(owner | fields)) == (pair.expected, 0)
    assert pair.decode(params, **owner) == (pair.expected, NUM_EXPORTED_TOKENS)  # it was there all the time


def test_another_prompt_finds_no_foreign_tokens(pair: Pair) -> None:
    params = prefill(pair.producer, prompt=[1, *PROMPT[1:]])
    assert pair.decode(params) == (pair.expected, 0)


def test_an_import_adds_what_the_cache_lacks(pair: Pair) -> None:
    params = prefill(pair.producer)
    assert pair.consumer.reset_prefix_cache()
    run(pair.consumer, request("warm", 1, PROMPT[:40]))
    outputs = run(pair.consumer, request("decode", NUM_TOKENS, kv_transfer=params))["decode"]
    assert (tokens(outputs), outputs[0].num_cached_tokens) == (pair.expected, NUM_EXPORTED_TOKENS)


def test_requests_run_while_another_waits_for_its_blocks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, transfer = threading.Event(), transfer_of(pair.consumer)
    import_blocks = transfer.import_blocks

    def wait_and_import(*arguments: Any) -> memoryview:
        gate.wait()
        return import_blocks(*arguments)

    monkeypatch.setattr(transfer, "import_blocks", wait_and_import)
    params = prefill(pair.producer)
    assert pair.consumer.reset_prefix_cache()
    pair.consumer.add_request(request("waits", NUM_TOKENS, kv_transfer=params))
    pair.consumer.add_request(request("aborted", NUM_TOKENS, kv_transfer=params._replace(transfer_id="another")))
    pair.consumer.abort_requests(["aborted"])
    pair.consumer.add_request(request("runs", 4, PROMPT[::-1]))
    names = [output.request_id for _ in range(6) for output in pair.consumer.step().outputs]
    assert names == ["runs"] * 4
    assert pair.consumer.stats().num_waiting == 1
    gate.set()
    outputs: list[EngineCoreOutput] = []
    while pair.consumer.has_unfinished_requests():
        outputs += pair.consumer.step().outputs
    assert (tokens(outputs), outputs[0].num_cached_tokens) == (pair.expected, NUM_EXPORTED_TOKENS)


def test_blocks_that_come_too_late_are_computed(pair: Pair, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core, gate = build(checkpoint, "kv_consumer", import_timeout_s=0.01), threading.Event()
    monkeypatch.setattr(transfer_of(core), "import_blocks", lambda *arguments: gate.wait())
    outputs = run(core, request("decode", NUM_TOKENS, kv_transfer=prefill(pair.producer)))["decode"]
    gate.set()
    core.shutdown()
    assert (tokens(outputs), outputs[0].num_cached_tokens) == (pair.expected, 0)


def test_weights_that_differ_share_no_block(pair: Pair, tmp_path: Path) -> None:
    other = build(write_checkpoint(tmp_path, 2), "kv_producer")
    params = prefill(other)
    assert pair.decode(params) == (pair.expected, 0)
    other.shutdown()
    assert pair.decode(params) == (pair.expected, 0)  # nor does an engine that is gone


def test_both_roles_in_one_engine_with_steps_scheduled_ahead(pair: Pair, checkpoint: Path) -> None:
    core = build(checkpoint, "kv_both", async_scheduling=True)
    params = prefill(core)
    assert core.reset_prefix_cache()
    outputs = run(core, request("decode", NUM_TOKENS, kv_transfer=params))["decode"]
    core.shutdown()
    assert (tokens(outputs), outputs[0].num_cached_tokens) == (pair.expected, NUM_EXPORTED_TOKENS)


@needs_nixl
def test_over_nixl_the_tokens_are_those_of_one_engine_also_when_an_import_fails(
    pair: Pair, checkpoint: Path, tmp_path: Path
) -> None:
    make_key_file(tmp_path / "key")
    producer, consumer = (build(checkpoint, role, key_file=tmp_path / "key") for role in ("kv_producer", "kv_consumer"))
    changes: list[tuple[dict[str, str], int]] = [({}, NUM_EXPORTED_TOKENS), ({"transfer_id": "0" * 64}, 0)]
    for change, num_cached in changes:
        params = prefill(producer)._replace(**change)
        assert consumer.reset_prefix_cache()
        outputs = run(consumer, request("decode", NUM_TOKENS, kv_transfer=params))["decode"]
        assert (tokens(outputs), outputs[0].num_cached_tokens) == (pair.expected, num_cached)
    producer.shutdown()
    consumer.shutdown()


def test_a_role_refuses_what_it_does_not_include(pair: Pair, checkpoint: Path) -> None:
    alone = build(checkpoint, None)
    ask_import = KVTransferParams(do_remote_prefill=True)
    for core, params in ((pair.consumer, ASK), (pair.producer, ask_import), (alone, ASK)):
        (output,) = run(core, request("r", 2, kv_transfer=params))["r"]
        assert output.finish_reason is FinishReason.ERROR
    alone.shutdown()


PAGE = Path(__file__).parents[1] / "docs" / "disaggregation.md"


@pytest.mark.full
def test_the_commands_and_the_proxy_of_the_page_give_the_text_of_one_server(launch: Callable[..., Any]) -> None:
    section = PAGE.read_text().partition("\n## Several hosts\n")[0]
    commands = [shlex.split(line)[3:] for line in section.splitlines() if line.startswith("llmstack serve MODEL ")]
    producer, consumer = (launch(*line[2:]) for line in commands)  # without the port
    for server in (producer, consumer):
        server.wait_until_ready()
    code = section.partition("```python\n")[2].partition("```")[0]
    for (_, port, *_), server in zip(commands, (producer, consumer), strict=True):
        code = code.replace(f"http://127.0.0.1:{port}", server.url)
    *definitions, last = code.strip().splitlines()
    scope: dict[str, Any] = {}
    exec("\n".join(definitions), scope)
    request = ast.literal_eval(last.removeprefix("print(complete(").removesuffix("))").replace(" * 8", ""))
    request["prompt"] *= 8
    answer = scope["complete"](request)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (answer["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    alone = httpx.post(f"{producer.url}/v1/completions", json=request, timeout=600).json()
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
    assert alone["kv_transfer_params"] is None
    for server, asked in ((consumer, {"do_remote_decode": True}), (producer, {"do_remote_prefill": True})):
        refused = httpx.post(f"{server.url}/v1/completions", json=request | {"kv_transfer_params": asked}, timeout=600)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params")


@needs_nixl
@pytest.mark.full
def test_the_commands_for_several_hosts_give_the_text_of_one_server(
    namespaces: Namespaces, launch: Callable[..., Any], tmp_path: Path
) -> None:
    section = PAGE.read_text().partition("\n## Several hosts\n")[2].partition("\n## ")[0]
    make_key_file(tmp_path / "cluster.key")
    commands = [shlex.split(line)[3:] for line in section.splitlines() if line.startswith("llmstack serve MODEL ")]
    clients = []
    for machine, command in zip(("first", "other"), commands, strict=True):
        uds = tmp_path / f"{machine}.sock"
        text = shlex.join(command[4:]).replace("eth0", "cable").replace("cluster.key", str(tmp_path / "cluster.key"))
        server = launch(*shlex.split(text), "--uds", str(uds), prefix=namespaces.prefix(machine))
        server.wait_for(lambda server=server: "llmstack is ready" in server.log, "ready server")
        clients.append(httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://host", timeout=600))
    producer, consumer = clients
    body = {"prompt": "Once upon a time there was a little boat. " * 8, "max_tokens": 24, "temperature": 0}
    alone = consumer.post("/v1/completions", json=body | {"cache_salt": "another"}).json()
    asked = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = producer.post("/v1/completions", json=body | asked).json()["kv_transfer_params"]
    assert params["remote_engine_id"].partition("@")[2].startswith(FIRST)
    answer = consumer.post("/v1/completions", json=body | {"kv_transfer_params": params}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == params["num_tokens"] > 0
    metrics = consumer.get("/metrics").text
    (found,) = re.findall(r'vllm:prompt_tokens_by_source_total\{.*"external_kv_transfer".*\} (\S+)', metrics)
    assert float(found) == params["num_tokens"]
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]

    for state, num_cached in (("down", 0), ("up", params["num_tokens"])):  # cut off from the blocks, and again not
        salted = body | {"cache_salt": state}
        params = producer.post("/v1/completions", json=salted | asked).json()["kv_transfer_params"]
        namespaces.set_cable(state)
        answer = consumer.post("/v1/completions", json=salted | {"kv_transfer_params": params}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_cached
        assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
    for client in clients:
        client.close()
