"""Run real shapes without a GPU, and compile the launched kernels for an H100; prints JSON lines.

Runs in a separate process: under the other tests' interpreter nothing is compiled.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.compiler import ASTSource

from specdec.config.engine import EngineConfig
from specdec.config.sampling import SamplingParams
from specdec.kernels.attention import flashinfer
from specdec.models import spec
from specdec.models.families import network
from specdec.models.mixers import ShortConv
from specdec.models.shapes import SHAPES
from specdec.state_slots.tree import TokenTree
from specdec.state_slots.window import Row, build_window
from tests.kernels import dry

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FEW = {"num_hidden_layers": 2, "full_attention_interval": 2}
"""One layer of each kind launches the kernels of all layers."""
EXPERTS = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
EXPERTS |= {"moe_shared_expert_intermediate_size": 3712, "n_group": 8, "topk_group": 4}
TREE = {"draft": "mtp", "num_steps": 4, "topk": 4, "num_draft_tokens": 8}
CHAIN = {"draft": "mtp", "num_steps": 3, "topk": 1, "num_draft_tokens": 4, "adaptive": False}
CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "qwen3-next": ({**SHAPES["qwen3-next-80b-a3b"], **FEW}, {**TREE, "quantize": "fp8"}),
    "nemotron-h": (
        {**SHAPES["nemotron-h-8b"], **EXPERTS, "hybrid_override_pattern": "M-*E"},
        {"draft": "suffix", "num_draft_tokens": 8},
    ),
    "qwen3.5": (
        {**SHAPES["qwen3.5-27b"], **FEW},
        {**CHAIN, "quantize": "fp8", "kv_dtype": "fp8", "slots": "snapshot"},
    ),
    "lfm3": (
        {**SHAPES["lfm3-1.7b"], "num_hidden_layers": 5},
        {"draft": "suffix", "num_draft_tokens": 32, "num_steps": 8, "topk": 4},
    ),
    "kimi-linear": (
        {
            **SHAPES["kimi-linear-48b"],
            **{"num_hidden_layers": 2, "num_experts": 8},
            "linear_attn_config": {
                **SHAPES["kimi-linear-48b"]["linear_attn_config"],
                **{"kda_layers": [1], "full_attn_layers": [2]},
            },
        },
        {"draft": "suffix", "num_draft_tokens": 8},
    ),
    "float32": ({**SHAPES["0.8b"], **FEW}, {**CHAIN, "dtype": "float32"}),
}
WHOLE = {
    "qwen3-next int4": (CASES["qwen3-next"][0], {**TREE, "quantize": "int4"}),
    "nemotron-h int8": (CASES["nemotron-h"][0], {**CASES["nemotron-h"][1], "quantize": "int8"}),
    "nemotron-h int4": (CASES["nemotron-h"][0], {**CASES["nemotron-h"][1], "quantize": "int4"}),
    "float32 int8": (CASES["float32"][0], {**CASES["float32"][1], "quantize": "int8"}),
}
"""Cases of which only the integer products are compiled: other kernels are those above."""
CONVOLVED, LIGHTNING = ("kimi-linear-48b", "jamba-mini", "lfm2-8b-a1b"), ("minimax-text-01",)
SUFFIX = {"draft": "suffix", "num_draft_tokens": 16}
OF_STATES = {"chunk_scan", "conv", "delta_net", "pending", "recurrence", "selective_scan"}
RECURRENT: Mapping[str, tuple[Sequence[str], Mapping[str, Any], set[str]]] = {
    "recurrent": (CONVOLVED, SUFFIX, OF_STATES),
    "recurrent float32": (CONVOLVED, {**SUFFIX, "dtype": "float32"}, {"chunk_scan"}),
    "lightning": (LIGHTNING, SUFFIX, {"chunk_scan", "recurrence"}),
}
"""Cases with further recurrent layers: their shapes, and the folders whose kernels are compiled, as each
kernel takes seconds."""
PROMPTS = (1, 7, 16, 17, 33, 65, 100, 128, 2048)
PATHS = range(1, 17)
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True, **own)
    for own in (
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 1},
        {"temperature": 0.7, "top_k": 20, "seed": 2},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "seed": 3},
        {"temperature": 0.0, "repetition_penalty": 1.2},
        # Without other tokens' log-probabilities: all are equally likely here, and would be sorted.
        {"temperature": 1.0, "logprobs": 0, "seed": 4},
    )
]


def recurrent(shapes: Sequence[str]) -> spec.NetworkSpec:
    """Return one network with a recurrent layer of each shape, with equally many convolution taps."""
    whole = network({**SHAPES["0.8b"], **FEW})
    layers = []
    for shape in shapes:
        mixer = next(mixer for mixer in network(SHAPES[shape]).mixers() if mixer.state_shape())
        mixer = replace(mixer, conv=4) if isinstance(mixer, ShortConv) else mixer
        layers.append(replace(whole.layers[0], mixers=(mixer,)))
    return replace(whole, layers=(*layers, whole.layers[-1]), mtp=())


def compile_for_sm90(compiled: dry.Compiled) -> dict[str, Any]:
    """Return registers, bytes of shared memory and of the stack, to which registers are spilled.

    `together`: four warps share a product's instruction (wgmma).
    """
    source = ASTSource(
        compiled.kernel, compiled.signature, dict(compiled.constants), dict(compiled.attributes)
    )
    made = triton.compile(source, target=dry.TARGET, options=compiled.options.__dict__)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needs = {key: int(number) for key, number in re.findall(r"(REG|STACK):(\d+)", usage)}
    shared = made.metadata.shared
    return {
        "kernel": str(compiled),
        "registers": needs["REG"],
        "stack": needs["STACK"],
        "shared": shared,
        "together": "wgmma" in made.asm["ptx"],
    }


def largest(found: Iterable[dry.Compiled]) -> list[dry.Compiled]:
    """Leave out kernels without an optional argument that another one with the same constants takes.

    They are the same code with a part left out, which needs no more registers: a quarter of all kernels.
    """
    by_constants: dict[object, list[dry.Compiled]] = {}
    for own in found:
        given = sorted((at, str(value)) for at, value in own.constants.items() if value is not None)
        by_constants.setdefault((own.kernel, own.options, tuple(given)), []).append(own)
    return [
        own
        for alike in by_constants.values()
        for own in alike
        if not any(own.arguments < other.arguments for other in alike)
    ]


def launch(launches: dry.Launches, case: str, *, ready: bool) -> list[dry.Compiled]:
    """Run a case; return the kernels first launched after the engine was made ready.

    If not `ready`, drafts do not depend on times: everything that a case can launch is launched.
    """
    if case in RECURRENT:
        shapes, settings, _ = RECURRENT[case]
        whole = recurrent(shapes)
    else:
        shape, settings = {**CASES, **WHOLE}[case]
        whole = network(shape)
    fixed = {"device": "cpu", "kernels": "triton", "graphs": True, "max_running": 6, "max_model_len": 4096}
    settings = settings if ready else {**settings, "adaptive": False}
    config = EngineConfig(**{"dtype": "bfloat16", "memory_bytes": 1 << 30, **fixed, **settings})
    model = dry.make(whole, config, ready=ready)
    with launches.new() as found:
        dry.serve(model, PROMPTS, PARAMS)
        if model.settings.config.slots == "record" and model.settings.drafters:
            loop, table_N = model.loop, torch.zeros(200, dtype=torch.int64)
            chain = TokenTree.chain([0])
            for longest in PATHS:
                row = Row(chain, 100, table_N, 0, [(0, 0)] * longest)
                window = build_window([row], loop.arena.layout.conv_width, loop.device)
                with torch.inference_mode():
                    model.network.forward(window, loop.arena)
    model.loop.close()
    return found


def pack_for_flashinfer() -> None:
    """Launch our only kernel that FlashInfer's attention needs."""
    for tree in (TokenTree.chain([0] * 4), TokenTree((0,) * 8, (-1, *[0] * 7)), TokenTree.chain([0] * 64)):
        row = Row(tree, 100, torch.zeros(20, dtype=torch.int64), 0)
        flashinfer.pack(build_window([row], 4, torch.device("cpu")).groups[0])


def main(cases: list[str], *, compiles: bool) -> None:
    """Print each case's late launches, then every kernel's resources."""
    launches = dry.install()
    for case in cases:
        late = launch(launches, case, ready=compiles)
        print(json.dumps({"case": case, "late": list(map(str, late))}), flush=True)
    pack_for_flashinfer()
    for compiled in largest(launches.compiled.values()) if compiles else ():
        if not WHOLE.keys().isdisjoint(cases) and not compiled.knows("BITS"):
            continue
        if any(case in RECURRENT and compiled.folder not in RECURRENT[case][2] for case in cases):
            continue
        print(json.dumps(compile_for_sm90(compiled)), flush=True)


if __name__ == "__main__":
    main([word for word in sys.argv[1:] if word != "--cold"], compiles="--cold" not in sys.argv)
