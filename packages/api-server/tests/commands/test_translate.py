"""Lines of other engines as commands of llmstack."""

from __future__ import annotations

import argparse
import shlex

import pytest

from llmstack_server.commands import ServeCommand
from llmstack_server.commands.translate import read_engines, translate
from llmstack_server.options.command_line import ALL_FOREIGN_FLAGS, SERVE_OPTIONS


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    ServeCommand().add_arguments(made)
    return made


def test_a_line_of_vllm_keeps_what_works_and_names_what_does_not():
    found = translate(
        "VLLM_USE_V1=1 vllm serve org/m --tensor_parallel_size 2 --moe-backend triton -cc.mode 3 \\\n"
        "  --enable-lora-bias --no-enable-prefix-caching --load-format fastsafetensors --bogus 3"
    )
    assert shlex.join(found.words) == (
        "org/m --tensor-parallel-size 2 --no-enable-prefix-caching --load-format fastsafetensors --host 0.0.0.0"
    )
    assert [line.split()[0] for line in found.differences] == ["--moe-backend", "-cc.mode", "--load-format", "--host"]
    assert [line.split()[0] for line in found.missing] == ["--enable-lora-bias:", "--bogus:"]


def test_a_line_of_sglang_gets_our_names():
    found = translate(
        "python3 -m sglang.launch_server --model-path org/m --tp 2 --mem-fraction-static 0.8 --disable-radix-cache "
        "--enable-metrics --tool-call-parser qwen25 --cuda-graph-bs 1 2 --attention-backend fa3 --dist-init-addr a:1"
    )
    assert shlex.join(found.words) == (
        "--model org/m --tensor-parallel-size 2 --gpu-memory-utilization 0.8 --no-enable-prefix-caching "
        "--tool-call-parser hermes --cudagraph-capture-sizes 1 2 --port 30000"
    )
    assert "--attention-backend fa3 has no effect: kernels are chosen for the machine" in found.differences
    assert [line.split()[0] for line in found.missing] == ["--dist-init-addr:"]


def test_a_line_of_llama_cpp_gets_our_names_and_its_port():
    found = translate(
        "./llama-server -hf org/m -c 4096 -ngl 99 --temp 0.7 -fa on --jinja --embeddings -ctk f16 -ctv q8_0"
    )
    assert shlex.join(found.words) == (
        "--model org/m --max-model-len 4096 --override-generation-config.temperature 0.7 --runner pooling "
        "--kv-cache-dtype float16 --port 8080"
    )
    assert any("temperature 0.8" in line for line in found.differences)
    assert [line.split()[0] for line in found.missing] == ["-ctv:"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [("ollama run x", "starts neither vllm serve"), ("", "starts neither"), ("vllm serve 'a", "not complete"),
     ("vllm serve " + "a" * 70_000, "more than 65536 characters")],
)  # fmt: skip
def test_other_texts_are_refused(line: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        translate(line)


def test_the_table_names_flags_that_there_are():
    ours = {flag for option in SERVE_OPTIONS for flag in (*option.flags, *option.negative_flags)}
    for engine in read_engines().values():
        assert engine.version
        targets = {*engine.flags.values(), *engine.switches.values(), *engine.defaults, *engine.values}
        bases = {target.partition("=")[0].partition(".")[0] for target in targets}
        assert bases - ours - set(ALL_FOREIGN_FLAGS) == set()
        assert not {*engine.flags, *engine.switches} & set(engine.without_effect)
        assert set(engine.switches_without_effect) <= set(engine.without_effect)
        assert set(engine.notes) <= set(engine.flags)


def test_the_command_prints_the_translation_and_ends(capsys: pytest.CaptureFixture[str]):
    namespace = parser().parse_args(["--translate", "vllm serve org/m --moe-backend triton"])
    assert (ServeCommand().problems(namespace), ServeCommand().run(namespace)) == ([], 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "llmstack serve org/m --host 0.0.0.0"
    assert lines[1].startswith("# --moe-backend triton has no effect")
    namespace = parser().parse_args(["--translate", "vllm serve org/m --enable-lora-bias"])
    assert ServeCommand().problems(namespace) == ["--enable-lora-bias: adapters of this kind are not supported"]
    assert namespace.exit_code == 1
