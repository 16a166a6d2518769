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
    [("ollama run x", "starts neither vllm serve"), ("vllm bench serve --model m", "llmstack bench is the command"),
     ("", "starts neither"), ("vllm serve 'a", "not complete"),
     ("vllm serve " + "a" * 70_000, "more than 65536 characters")],
)  # fmt: skip
def test_other_texts_are_refused(line: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        translate(line)


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("docker run --gpus all -v ~/hub:/hub -e HF_TOKEN=t -p 8000:8000 vllm/vllm-openai:v0.33.0 --model org/m",
         "HF_TOKEN=t llmstack serve --model org/m --host 0.0.0.0"),
        ("docker run lmsysorg/sglang:latest python3 -m sglang.launch_server --model-path org/m",
         "llmstack serve --model org/m --port 30000"),
        ("docker run ghcr.io/ggml-org/llama.cpp:server-cuda -m /models/m.gguf --port 8080",
         "llmstack serve --model /models/m.gguf --port 8080"),
        ("conda activate vllm && uv run --with vllm vllm serve org/m", "llmstack serve org/m --host 0.0.0.0"),
        ("nohup vllm serve org/m --port 81 > vllm.log 2>&1 &", "llmstack serve org/m --port 81 --host 0.0.0.0"),
        ("vllm serve org/m >log && echo | tee x; vllm serve b", "llmstack serve org/m --host 0.0.0.0"),
        ("# two cards\nvllm serve org/m \\\n  -tp 2  # or four\necho done",
         "llmstack serve org/m -tp 2 --host 0.0.0.0"),
        ("export HF_HOME=/d NAME='a b'; vllm serve $NAME", "HF_HOME=/d llmstack serve 'a b' --host 0.0.0.0"),
        ("bash -lc 'vllm serve org/m --port $PORT'", 'llmstack serve org/m --port "$PORT" --host 0.0.0.0'),
        ("""vllm serve "$M" --api-key 'a$b' --port ${PORT:-1}""",
         """llmstack serve "$M" --api-key 'a$b' --port "${PORT:-1}" --host 0.0.0.0"""),
        ("docker run -p 8000:8000 --entrypoint vllm vllm/vllm-openai:latest serve org/m --port 80",
         "llmstack serve org/m --port 80 --host 0.0.0.0"),
        ("docker run -v a/b:/c public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:latest --model=org/m",
         "llmstack serve --model org/m --host 0.0.0.0"),
        ("podman run --name vllm -v vllm:/m registry.redhat.io/rhaiis/vllm-cuda-rhel9:3.2 --model org/m",
         "llmstack serve --model org/m --host 0.0.0.0"),
        ("docker run rocm/vllm:latest vllm serve org/m -n2", "llmstack serve org/m -n 2 --host 0.0.0.0"),
        ("python -m sglang_router.launch_server --model-path org/m --dp 2",
         "llmstack serve --model org/m --data-parallel-size 2 --port 30000"),
        ("vllm serve org/m --spec-method ngram",
         "llmstack serve org/m --speculative-config.method ngram --host 0.0.0.0"),
        ("python -m vllm.entrypoints.cli.main serve org/m", "llmstack serve org/m --host 0.0.0.0"),
    ],
)  # fmt: skip
def test_what_a_shell_puts_around_a_command_is_left_out(line: str, ours: str):
    found = translate(line)
    assert (str(found).splitlines()[0], found.missing) == (ours, [])


def test_variables_that_nothing_here_reads_are_named():
    found = translate(
        "VLLM_ATTENTION_BACKEND=FLASHINFER CUDA_VISIBLE_DEVICES=0 LLAMA_ARG_PORT=9 llama-server -m m.gguf"
    )
    assert found.variables == {"CUDA_VISIBLE_DEVICES": "0"}
    assert "the variable VLLM_ATTENTION_BACKEND has no effect" in found.differences
    assert found.missing == ["LLAMA_ARG_PORT: write it as a flag of llama-server"]


def test_variables_that_a_flag_replaces_become_flags():
    found = translate(
        "VLLM_BATCH_INVARIANT=1 VLLM_CPU_KVCACHE_SPACE=40 VLLM_SERVER_DEV_MODE=0 VLLM_TORCH_PROFILER_DIR=/t \\\n"
        "vllm serve m"
    )
    assert shlex.join(found.words) == (
        "m --host 0.0.0.0 --enable-deterministic-inference --kv-cache-memory-bytes 40G "
        "--profiler-config.torch_profiler_dir /t"
    )
    assert "the variable VLLM_SERVER_DEV_MODE has no effect" in found.differences


def test_values_that_are_refused_here_are_missing():
    found = translate("llama-server -m m.gguf -ctk q8_0 -c 0 --seed -1 --api-key a,b --pooling cls --no-webui")
    assert shlex.join(found.words) == (
        "--model m.gguf --max-model-len auto --api-key a b --pooler-config.pooling_type CLS --no-ui --port 8080"
    )
    assert [line.split("'")[0] for line in found.missing] == ["--kv-cache-dtype: invalid value "]
    assert translate("vllm serve org/m --max-model-len").missing == ["--max-model-len: expected a value"]


def test_flags_without_a_counterpart_say_what_to_use():
    found = translate(
        "sglang serve org/m --ep-size 8 --tp 8 --nnodes 2 --speculative-algorithm EAGLE "
        "--load-balance-method round_robin"
    )
    assert shlex.join(found.words) == (
        "org/m --enable-expert-parallel --tensor-parallel-size 8 --nnodes 2 --routing round_robin --port 30000"
    )
    assert [line.split()[:2] for line in found.missing] == [["--speculative-algorithm:", "these"]]
    assert "--enable-expert-parallel" not in translate("sglang serve org/m --ep-size 1").words
    rope = translate("""vllm serve org/m --rope-scaling '{"rope_type": "yarn"}'""")
    assert rope.words[1:3] == ["--hf-overrides.rope_scaling", '{"rope_type": "yarn"}']


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
        assert not {*engine.flags, *engine.switches, *engine.without_effect} & set(engine.refused)
        assert set(engine.comma_lists) <= set(engine.flags)


def test_the_command_prints_the_translation_and_ends(capsys: pytest.CaptureFixture[str]):
    namespace = parser().parse_args(["--translate", "vllm serve org/m --moe-backend triton"])
    assert (ServeCommand().problems(namespace), ServeCommand().run(namespace)) == ([], 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "llmstack serve org/m --host 0.0.0.0"
    assert lines[1].startswith("# --moe-backend triton has no effect")
    namespace = parser().parse_args(["--translate", "vllm serve org/m --enable-lora-bias"])
    assert ServeCommand().problems(namespace) == ["--enable-lora-bias: adapters of this kind are not supported"]
    assert namespace.exit_code == 1
