"""The benchmark's options: each field is a command-line option."""

from specdec.bench.options import Counts, names, numbers
from specdec.config.base import Settings
from specdec.config.fields import integer, switch, text


class KernelOptions(Settings):
    """Options of `python -m tools.kernels`; None is the device's default."""

    shape: list[str] | None = names(None, "named sizes (default: two real ones, tiny on a CPU)")
    batch: Counts | None = numbers(None, "rows (default: 1,64, with 16,256 to verify; 1,4 on a CPU)")
    window: Counts | None = numbers(None, "tokens (default: 1,8, with 4,16 to verify)")
    context: int | None = integer(None, "tokens before a window (default: 1024; 64 on a CPU)")
    only: list[str] | None = names(
        None,
        "measure these operations alone, such as causal_conv,linear; peers: those that other packages have",
    )
    repeats: int = integer(20, "counted runs")
    device: str = text("auto", "auto, cpu, cuda or cuda:<number>")
    kernels: str = text("auto", "auto, reference, cpu, native or triton")
    dtype: str = text("auto", "bfloat16 on a GPU, float32 on a CPU")
    peers: bool = switch(True, "beside other packages")
