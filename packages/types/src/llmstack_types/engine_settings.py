"""Options of an engine that its configurations have, too.

Each is declared here alone. `llmstack_llm.engine_options` has them among the others, under a title and with their
flags. A configuration inherits the groups that it needs: `ModelRunnerConfig`, `SchedulerConfig` or `EngineConfig`.
"""

from __future__ import annotations

from llmstack_types.options import option, option_group
from llmstack_types.vocabulary import (
    DTYPE_ALIASES,
    KV_CACHE_DTYPE_ALIASES,
    QUANTIZATION_ALIASES,
    Device,
    DType,
    GGUFActivations,
    KVCacheDType,
    LoadFormat,
    LogFormat,
    LogprobsMode,
    ModelImpl,
    QuantizationScheme,
)


@option_group
class WeightSettings:
    """The weights, and how they are read."""

    load_format: LoadFormat = option(
        "auto",
        same_as=dict.fromkeys(
            ("fastsafetensors", "instanttensor", "runai_streamer"),
            ("safetensors", "the same safetensors files are read, memory-mapped"),
        )
        | {"bitsandbytes": ("safetensors", "config.json says how the weights of the safetensors files are rounded")}
        | {"hf": ("auto", "the format of the repository's files is detected")},
        help="'dummy' makes random weights in place of reading them; 'mistral' reads consolidated*.safetensors of a "
        "repository that has its weights in two forms",
    )
    model_impl: ModelImpl = option(
        "auto", help="the model code that runs: that of llmstack or of transformers; 'auto' prefers llmstack's"
    )
    dtype: DType = option(
        "auto", aliases=DTYPE_ALIASES, help="type of weights and activations; 'auto' is the checkpoint's"
    )
    quantization: QuantizationScheme | None = option(
        None,
        short="-q",
        aliases=QUANTIZATION_ALIASES,
        same_as={
            "int8_per_channel_weight_only": (
                "int8",
                "weights alone are rounded, with a scale for each 128 inputs of an output in place of one",
            ),
        },
        help="round the weights of linear layers while loading a checkpoint in full precision (int8, int4, fp8; "
        "int8_dynamic and int4_dynamic round inputs too), or name the format of a quantized checkpoint (default: what "
        "its config.json says)",
    )
    gguf_activations: GGUFActivations = option(
        "auto",
        help="inputs of the layers of a GGUF file on a CPU: 'rounded' to 8 bits in groups, which is faster, 'exact', "
        "or 'auto', which is exact for files of less than 256 MiB",
    )
    seed: int = option(0, help="seed of dummy weights, and of offline requests without a seed")


@option_group
class UseSettings:
    """Where a model runs, and which of its abilities are offered."""

    device: Device = option("auto", help="'auto' is a GPU where there is one, else the CPU")
    enable_prompt_embeds: bool = option(False, help="prompts of completions may be vectors in place of tokens")
    language_model_only: bool = option(
        False, help="serve the text model alone of a model with parts for images or sound"
    )


@option_group
class MediaSettings:
    """Settings of items that prompts may have in place of tokens."""

    enable_mm_embeds: bool = option(
        False, help="vectors in place of a picture, as parts of the type image_embeds: safetensors files in base64"
    )


@option_group
class KVSettings:
    """The form of the KV cache."""

    block_size: int = option(16, at_least=1, replaces={"--block-size-override": ()}, help="tokens per KV block")
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        aliases=KV_CACHE_DTYPE_ALIASES,
        help="type of stored keys and values: 'auto' is the model's, 'fp8' halves the size at a small loss of accuracy",
    )
    gpu_memory_utilization: float = option(
        0.9,
        also=("--device-memory-utilization",),
        above=0,
        at_most=1,
        metavar="X",
        help="share of the GPU's memory that the server may use",
    )


@option_group
class ComputationSettings:
    """How a step is computed."""

    enforce_eager: bool = option(
        False, help="capture no decode steps, as CUDA graphs on a GPU or native steps on a CPU; for debugging"
    )
    enable_deterministic_inference: bool = option(
        False, help="refuse to start unless logits are bitwise equal alone, in any batch and in chunks"
    )


@option_group
class LogprobSettings:
    """Settings of what is said about tokens."""

    logprobs_mode: LogprobsMode = option(
        "raw_logprobs",
        help="log-probabilities of the model's logits, or of the processed ones that tokens are drawn from",
    )


@option_group
class StageSettings:
    """Stages of the model, each of which can compute another step meanwhile.

    With several a request waits while the step that samples its next token is under way, and each step takes only its
    share of the running requests, so that every stage has work.
    """

    pipeline_parallel_size: int = option(
        1,
        short="-pp",
        at_least=1,
        at_most=64,
        help="stages that the model's layers are split into, each of --tensor-parallel-size ranks; on CPUs only",
    )


@option_group
class ParallelSettings(StageSettings):
    """Ranks of one model."""

    tensor_parallel_size: int = option(
        1,
        short="-tp",
        at_least=1,
        at_most=64,
        help="ranks that share every layer of the model: on GPUs one each, on a CPU a process each",
    )
    enable_expert_parallel: bool = option(
        False,
        short="-ep",
        help="spread whole experts of a mixture over the ranks of --tensor-parallel-size, instead of a part of each",
    )


@option_group
class AdapterSettings:
    """LoRA adapters that the model can use."""

    enable_lora: bool = option(False, help="serve LoRA adapters beside the model")
    max_lora_rank: int = option(16, at_least=1, at_most=512, help="maximum rank of an adapter")
    max_lora_bytes: int = option(
        1 << 30, at_least=1, suffixes=True, metavar="BYTES", help="maximum size of an adapter's file"
    )


@option_group
class StepSettings:
    """The size of a step, for the scheduler and the model runner."""

    max_num_seqs: int = option(256, at_least=1, help="maximum requests per step")
    encoder_cache_tokens: int = option(
        0,
        at_least=0,
        suffixes=True,
        help="for models that take media: keep up to N vectors of encoded items; a larger item is refused (default: "
        "the tokens of a step, or the largest item)",
    )


@option_group
class SchedulerSettings:
    """Which requests run in a step.

    Attributes:
        max_num_partial_prefills: Shorter prompts, that a step completes, go before longer ones.
        state_snapshot_interval: Rounded up to whole blocks.
        fair_quantum: No request counts with more tokens of output than that while it waits.
    """

    enable_chunked_prefill: bool = option(True, help="split long prompts over several steps")
    long_prefill_token_threshold: int = option(
        0, at_least=0, suffixes=True, help="maximum tokens of one request per step; 0 for no limit"
    )
    max_num_partial_prefills: int = option(
        0, at_least=0, help="maximum requests with partly computed prompts; 0 for no limit"
    )
    shorter_prompts_first: bool = option(False, help="let long prompts wait for others")
    state_snapshot_interval: int = option(
        0,
        at_least=0,
        suffixes=True,
        help="for models with convolutions or another state: keep the state of every N tokens of a prompt for later "
        "requests, beside that of its end; 0 keeps the states where its chunks end",
    )
    encoder_budget_units: int = option(
        0,
        at_least=0,
        suffixes=True,
        help="for models that take media: encode up to N patches or frames in a step with requests that generate; "
        "larger items take several steps (default: on a CPU what costs as much as the step without it; else the tokens "
        "of a step; of speech four times as much, while more requests wait than generate)",
    )
    fair_quantum: int = option(
        2048,
        at_least=1,
        suffixes=True,
        help="tokens of one API key's requests that are admitted before the next key has its turn, under the policies "
        "'fair' and 'deadline'",
    )


@option_group
class StepLogSettings:
    """Order and records of steps.

    Attributes:
        async_scheduling: It changes no output. It gains where the device computes by itself, and delays outputs by a
            step where it does not, as on a CPU. None decides by that and by drafts, which need the last tokens.
    """

    async_scheduling: bool | None = option(
        None,
        help="schedule the next step before the tokens of the last one arrive (default: on a GPU without "
        "--speculative-config)",
    )
    record_steps: str | None = option(
        None,
        metavar="FILE",
        replaces={"--enable-trace-replay": ("false", "0")},
        help="write a log of every step with all token ids, for `llmstack replay` (default: the last steps in memory)",
    )
    step_log_bytes: int = option(
        8 << 20, at_least=0, at_most=1 << 27,
        help="memory for the log of the last steps (GET /steps/log), without --record-steps; 0 keeps none"
    )  # fmt: skip
    snapshot_steps: int = option(
        4096, at_least=0,
        help="steps between two snapshots in the log of steps, at least 64; 0 writes none"
    )  # fmt: skip
    shadow_scheduler: str | None = option(
        None,
        metavar="CHANGES",
        help="compare with another scheduler, which runs on the same requests without effect: settings separated by "
        "commas, a policy, or module:Class",
        example="max_num_batched_tokens=512,policy=fair",
    )


@option_group
class PrefixSettings:
    """Blocks that are kept for later use."""

    enable_prefix_caching: bool = option(True, help="reuse the KV blocks of equal prefixes")
    session_eviction: bool = option(False, help="evict first what sessions want last")
    num_host_blocks: int = option(
        0, at_least=0, suffixes=True, help="blocks in host memory for preempted requests; 0 recomputes them"
    )
    kv_cache_dir: str | None = option(
        None,
        metavar="DIR",
        help="private folder in which cached prefixes outlive the server, encrypted, to be read in place of computed",
    )
    kv_cache_disk_bytes: int = option(
        10 << 30,
        at_least=1 << 20,
        suffixes=True,
        metavar="BYTES",
        help="size of the files in --kv-cache-dir, such as 100G; those used least recently go first",
    )


@option_group
class ProcessSettings:
    """The processes of an engine.

    Attributes:
        weights_name: What they serve, by the name in the list that a reload chooses from.
    """

    weights_name: str = "start"

    warm_spare: bool = option(
        False,
        help="keep one more engine core with the model loaded, on CPUs, so that one that crashes is replaced within a "
        "second; it takes the memory of the weights again",
    )


@option_group
class ReportSettings:
    """Reports of an engine core."""

    log_format: LogFormat = option("text", help="lines of the log as text, or as a JSON object each")
    trace: bool = option(False, help="print a line for each stage of each request to standard error")
    audit_hits: float | None = option(
        None,
        at_least=0,
        at_most=1,
        metavar="SHARE",
        help="share of the prefix hits that are computed again and compared while there is no request; 0.001 by "
        "default where equal bits are promised, and 0 elsewhere, where log-probabilities may differ by 0.25",
    )
