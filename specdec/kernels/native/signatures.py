"""Signatures of the C kernels, and the function that replays a list of calls."""

import ctypes

import torch

SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

Pointer, Count, Real, Flag = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int

ARGUMENTS = {
    "linear": "p nnn pp p nn",
    "linear_by_head": "p nnn nn pp n",
    "linear_integer": "p nnn ii ppp p nn",
    "gumbel": "pp nn p",
    "perturb": "p nn pppp pp p p",
    "adjust": "p nn n pppp n ppppppp p",
    "topk": "p nnn pp",
    "scatter_columns": "p nn p n p",
    "gather": "p n p n n p n",
    "add": "pp n p",
    "scale": "p n f p",
    "rms_norm": "p nnn nn p i f p",
    "add_rms_norm": "pp nn p i f p",
    "gated_norm": "pp nnn n p n f i p",
    "swiglu": "p nn n f p",
    "geglu": "p nn n p",
    "relu2": "p n p",
    "rotate": "p nnnn nn pp p",
    "causal_conv": "p nnn n n pp i p n p p nn ppp n ppp p p",
    "l2_normalise": "p nnn n f p",
    "mamba_step": "p nn n p ff p",
    "sigmoid": "p nn n p",
    "path_conv": "nnn nn pp p n p p nn ppp n p",
    "append": "pp nnnn nn p nnnn n p n p",
    "scan_window": "ppppp p nnnnnn i p n p p p ppp n ppp p",
    "delta_net": "p nn nnnn n ppp fifi p n p p nn ppp n ppp p p n p p p f p",
    "selective_scan": "pn pn pn pp ppp p nnnnn p n p p p ppp n ppp p",
    "move": "p nnnn nn nn p nn pp n",
    "tensor_op": "p",
    "unpack_blocks": "iiiiii p n ppppp",
    "lay_integers": "p nn i p pp nnn p",
    "self_attention": "p nnnnnn i pp i f pp ni p nnnn n p n p p f n p",
}
KINDS = {"p": Pointer, "n": Count, "f": Real, "i": Flag}

UNTYPED = ("gather", "gumbel", "topk", "scan_window", "move", "tensor_op", "unpack_blocks", "lay_integers")
"""Functions without a dtype suffix."""

SIGNATURES = {
    full: arguments.replace(" ", "")
    for name, arguments in ARGUMENTS.items()
    for full in ((name,) if name in UNTYPED else tuple(f"{name}_{suffix}" for suffix in SUFFIX.values()))
}
"""Argument types of every C function, by its full name."""
NUMBERS = {name: number for number, name in enumerate(SIGNATURES)}
"""A function's number in a list of calls."""

_CASTS = {"p": "(void *)a[{}]", "n": "a[{}]", "f": "*(const float *)(a + {})", "i": "(int)a[{}]"}


def replayer() -> str:
    """Return the C function that replays a list of calls, each a function number and its arguments."""
    cases = []
    for name, arguments in SIGNATURES.items():
        values = ", ".join(_CASTS[kind].format(i) for i, kind in enumerate(arguments))
        cases.append(f"case {NUMBERS[name]}: {name}({values}); a += {len(arguments)}; break;")
    body = "\n".join(cases)
    return (
        "void replay(const ix *a, const ix *end) {\n"
        f"while (a < end) switch (*a++) {{\n{body}\ndefault: return;\n}}\n}}\n"
    )
