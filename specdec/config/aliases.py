"""Options of vLLM, SGLang, llama.cpp and Ollama: equivalents, and advice for the others."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from specdec.config.engine import EngineConfig
from specdec.errors import ConfigError

Meaning = Mapping[str, object]
"""Settings that an option is translated to."""

FP8 = MappingProxyType({"fp8_e4m3": "fp8"})
METHODS = MappingProxyType(
    {
        **{name: name for name in ("ngram", "suffix", "mtp", "eagle")},
        "eagle3": "eagle",
        "dflash": "block",
        "dspark": "block",
        **{f"{family}_mtp": "mtp" for family in ("qwen3_next", "qwen3_5", "nemotron_h")},
    }
)
"""Drafters by `method` of vLLM's speculative_config."""
ALGORITHMS = MappingProxyType(
    {"EAGLE": "eagle", "EAGLE3": "eagle", "DFLASH": "block", "NEXTN": "mtp", "NGRAM": "ngram"}
)
"""Drafters by SGLang's names."""
PACKED = ("awq", "gptq", "compressed-tensors")
"""vLLM's and SGLang's names of packed formats, which are detected; with `_marlin` they name kernels."""
KEYS = ("method", "model", "num_speculative_tokens")


@dataclass(frozen=True, slots=True)
class Alias:
    """Another engine's option: the settings it translates to, and the parser of its value."""

    engine: str
    fields: tuple[str, ...]
    read: Callable[[object], Meaning]
    is_switch: bool = False
    note: str = ""


def _value(engine: str, field: str, words: Mapping[str, str] = MappingProxyType({}), note: str = "") -> Alias:
    """Return an alias with the setting's own value, except for renamed words."""

    def read(value: object) -> Meaning:
        return {field: words.get(value, value) if isinstance(value, str) else value}

    return Alias(engine, (field,), read, note=note)


def _quantization(value: object) -> Meaning:
    """Translate a quantisation method; published formats are refused, since they are detected."""
    if isinstance(value, str) and value.removesuffix("_marlin") in PACKED:
        message = f"quantization: {value} checkpoints are detected; leave the option out"
        raise ConfigError(message, field="quantize")
    return {"quantize": value}


def _switch(engine: str, field: str, *, on: bool, off: bool | None) -> Alias:
    """Return an alias for a setting with one of two values."""

    def read(value: object) -> Meaning:
        return {field: (on if value else off) if isinstance(value, bool) else value}

    return Alias(engine, (field,), read, is_switch=True, note=f"`{on}`")


def _speculative_config(value: object) -> Meaning:
    """Translate vLLM's object or its JSON, which describes chains of a number of tokens."""
    try:
        fields = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _bad_config(f"it is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise _bad_config("it is not a JSON object")
    if unknown := fields.keys() - set(KEYS):
        raise _bad_config(f"{sorted(map(str, unknown))[0]!r} is not a supported key ({', '.join(KEYS)})")
    method, folder, depth = map(fields.get, KEYS)
    if method is not None and method not in METHODS:
        raise _bad_config(f"the method {method!r} is none of {', '.join(METHODS)}")
    if depth is not None and (type(depth) is not int or depth < 1):
        raise _bad_config(f"num_speculative_tokens cannot be {depth!r:.40}; it is an integer of at least 1")
    draft = {} if method is None else {"draft": METHODS[method]}
    model = {} if folder is None else {"draft_model": folder}
    chain = {} if depth is None else {"num_steps": depth, "topk": 1}
    return {**draft, **model, **chain}


def _bad_config(reason: str) -> ConfigError:
    return ConfigError(
        f'speculative_config: {reason}; give such as \'{{"method": "mtp", "num_speculative_tokens": 3}}\', '
        "or draft, draft_model and num_steps",
        field="speculative_config",
    )


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        "max_num_seqs": _value("vLLM", "max_running"),
        "max_running_requests": _value("SGLang", "max_running"),
        "max_num_batched_tokens": _value("vLLM", "chunk_tokens", note="decoding sequences are not counted"),
        "chunked_prefill_size": _value("SGLang", "chunk_tokens"),
        "context_length": _value("SGLang", "max_model_len"),
        "enable_prefix_caching": _switch("vLLM", "prefix_cache", on=True, off=False),
        "disable_radix_cache": _switch("SGLang", "prefix_cache", on=False, off=True),
        "enforce_eager": _switch("vLLM", "graphs", on=False, off=None),
        "disable_cuda_graph": _switch("SGLang", "graphs", on=False, off=None),
        "kv_cache_dtype": _value("vLLM and SGLang", "kv_dtype", FP8),
        "quantization": Alias(
            "vLLM and SGLang",
            ("quantize",),
            _quantization,
            note="a checkpoint's own format is detected: leave it out",
        ),
        "speculative_config": Alias(
            "vLLM",
            ("draft", "draft_model", "num_steps", "topk"),
            _speculative_config,
            note=f"a JSON object with {', '.join(f'`{key}`' for key in KEYS)}; drafts are chains",
        ),
        "speculative_algorithm": _value("SGLang", "draft", ALGORITHMS),
        "speculative_draft_model_path": _value("SGLang", "draft_model"),
        "speculative_num_steps": _value("SGLang", "num_steps"),
        "speculative_eagle_topk": _value("SGLang", "topk"),
        "speculative_num_draft_tokens": _value("SGLang", "num_draft_tokens"),
        "tensor_parallel_size": _value("vLLM", "tp"),
        "tp_size": _value("SGLang", "tp"),
        "random_seed": _value("SGLang", "seed"),
        "max_new_tokens": _value("SGLang", "max_tokens"),
        "n_predict": _value("llama.cpp", "max_tokens", note="also `-n` and `--predict`"),
        "num_predict": _value("Ollama", "max_tokens"),
        "num_ctx": _value("Ollama", "max_model_len"),
        "temp": _value("llama.cpp", "temperature"),
        "parallel": _value("llama.cpp", "max_running", note="also `-np`"),
        "model_draft": _value("llama.cpp", "draft_model", note="also `-md`"),
        "watchdog_timeout": _value("SGLang", "step_timeout"),
        "disaggregation_mode": _value("SGLang", "role"),
        "disaggregation_bootstrap_port": _value("SGLang", "reach_port"),
    }
)

_MODEL = "name the model without an option, after the command"
_ONE_DEVICE = "a server has one device; start one for each and balance between them"
_MEMORY = "give --memory-bytes, the memory for sequences and drafts without the weights"
_ALWAYS = "it is always on; leave it out"

INSTEAD: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        EngineConfig.__name__: MappingProxyType(
            {
                "model": _MODEL,
                "model_path": _MODEL,
                "hf_repo": f"{_MODEL}; OWNER/NAME is one on the Hugging Face hub",
                "ctx_size": "give --max-model-len",
                "threads": "set OMP_NUM_THREADS to the number of threads",
                "flash_attn": _ALWAYS,
                "n_gpu_layers": "the whole model runs on one device; leave it out, or give --device",
                "gpu_memory_utilization": _MEMORY,
                "mem_fraction_static": _MEMORY,
                "pipeline_parallel_size": _ONE_DEVICE,
                "data_parallel_size": _ONE_DEVICE,
                "dp_size": _ONE_DEVICE,
                "swap_space": "give --host-cache-bytes, which keeps evicted prefixes in the host's memory",
                "cpu_offload_gb": "weights stay on the device; give --quantize for smaller ones",
                "block_size": "KV blocks have 16 tokens; leave it out",
                "page_size": "KV blocks have 16 tokens; leave it out",
                "attention_backend": "give --kernels",
                "revision": "append it to the model, as in OWNER/NAME@REVISION",
                "download_dir": "set HF_HUB_CACHE to the folder, or HF_HOME to the one above it",
                "trust_remote_code": "code of a checkpoint is never run; leave it out",
                "enable_chunked_prefill": f"{_ALWAYS}, or give --chunk-tokens",
                "batch_size": "give --chunk-tokens for the tokens of a step, --max-running for its sequences",
                "tokenizer": "the model's own is used; leave it out",
                "mmap": "weights of GGUF files are always mapped; leave it out",
                "mlock": "weights cannot be locked in memory; leave it out",
                "lora": "adapters are not supported; merge them into the checkpoint",
                "mmproj": "image input is not supported; leave it out",
            }
        ),
        "SamplingParams": MappingProxyType(
            {
                "file": "give specdec generate --prompt-file, or pipe the message into specdec chat",
                "system_prompt": "give specdec chat --system; specdec generate has a prompt only",
                "conversation": "specdec chat MODEL talks to a model in the terminal; leave it out",
            }
        ),
        "ServerConfig": MappingProxyType(
            {
                "enable_auto_tool_choice": _ALWAYS,
                "enable_metrics": _ALWAYS,
                "jinja": _ALWAYS,
                "alias": "give --served-model-name",
                "generation_config": "give --sampling-defaults openai to ignore the model's",
                "chat_template": "put it into the folder as chat_template.jinja; a GGUF file must hold it",
                "disable_log_requests": "prompts are logged only with --log-prompts; leave it out",
                "uvicorn_log_level": "give -v for DEBUG lines; leave it out otherwise",
                "root_path": "have the proxy strip the prefix, so that paths begin with /v1; leave it out",
                "ssl_ca_certs": "leave clients' certificates to a proxy, as in docs/deployment.md",
                "ssl_cert_reqs": "leave clients' certificates to a proxy, as in docs/deployment.md",
                "kv_transfer_config": "give --role, as in docs/disaggregation.md",
                "disaggregation_transfer_backend": "NIXL is the only transfer library; leave it out",
                "reach_secret": "set SPECDEC_REACH_SECRET in the environment",
                "disaggregation_ib_device": "set UCX_NET_DEVICES to the device",
            }
        ),
    }
)
"""Unsupported options of other engines with advice, by settings class."""
SHORT: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "model": ("-m",),
        "hf_repo": ("-hf",),
        "ctx_size": ("-c",),
        "threads": ("-t", "--num-thread"),
        "flash_attn": ("-fa",),
        "n_gpu_layers": ("-ngl", "--ngl", "--gpu-layers", "--num-gpu"),
        "mmap": ("--no-mmap",),
        "lora": ("--lora-modules", "--enable-lora"),
        "tensor_parallel_size": ("-tp",),
        "n_predict": ("-n", "--predict"),
        "seed": ("-s",),
        "parallel": ("-np",),
        "model_draft": ("-md",),
        "batch_size": ("-b",),
        "file": ("-f",),
        "system_prompt": ("-sys",),
        "conversation": ("-cnv", "-i", "--interactive"),
        "alias": ("-a",),
        "uvicorn_log_level": ("--log-level",),
    }
)
"""Further names of these options."""
