"""Time one call of an operation, and measure the machine's copy bandwidth and launch time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.bench.report import SampleSummary, summarise
from specdec.core.device.capture import Capturer

Call = Callable[[], object]

WARMUP = 3
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
LAUNCHES = 200
CPU_SECONDS = 0.25
"""Time limit for a problem's samples: some of torch's plain operations are slow."""
FEWEST = 3


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: SampleSummary
    how: str
    """`graph`: calls replayed from a captured graph; `eager`: launched one by one; `clock`: on a CPU."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A device's measured constants for the time model."""

    copy_bytes_per_s: float
    launch_s: float
    """Minimum time of a kernel among others, in a CUDA graph if available."""

    def predict_s(self, num_bytes: float) -> float:
        return num_bytes / self.copy_bytes_per_s + self.launch_s


def time_calls(calls: Sequence[Call], device: torch.device, repeats: int, *, asks: bool = False) -> Timing:
    """Time a call by running all of them in turn: each has its own buffers, so that caches do not help.

    Calls that read values on the host (`asks`) are not captured.
    """
    if device.type == "cpu":
        return Timing(summarise(_clock(calls, repeats)), "clock")
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    replay, how = _captured(calls, device, asks=asks)
    for _ in range(WARMUP):
        replay()
    return Timing(summarise([s / len(calls) for s in _events(replay, repeats)]), how)


def measure_machine(device: torch.device, num_bytes: int | None = None) -> Machine:
    """Copy a buffer larger than any cache, and launch empty kernels.

    On a GPU an elementwise kernel copies, as kernels do: on an H200 `copy_` reaches 2.7 TB/s, a kernel 4.2.
    """
    count = num_bytes or COPY_BYTES[device.type]
    source, target = (torch.ones(count // 4, dtype=torch.float32, device=device) for _ in range(2))
    on_gpu = device.type == "cuda"
    copy = time_calls(
        [lambda: torch.mul(source, 1.0, out=target) if on_gpu else target.copy_(source)], device, 7
    )
    one = torch.zeros(1, device=device)
    calls = [lambda: one.add_(1)] * LAUNCHES
    launch = time_calls(calls, device, 7 if on_gpu else LAUNCHES)
    return Machine(2 * target.nbytes / copy.seconds.median, launch.seconds.median)


def _clock(calls: Sequence[Call], repeats: int) -> list[float]:
    calls[0]()
    samples: list[float] = []
    for i in range(max(repeats, FEWEST)):
        start_s = time.perf_counter()
        calls[i % len(calls)]()
        samples.append(time.perf_counter() - start_s)
        if len(samples) >= FEWEST and sum(samples) > CPU_SECONDS:
            break
    return samples


def _captured(calls: Sequence[Call], device: torch.device, *, asks: bool) -> tuple[Call, str]:
    """Capture the calls in one CUDA graph; launch eagerly if that fails."""

    def launch() -> None:
        for call in calls:
            call()

    if asks:
        return launch, "eager"
    capturer = Capturer(device)
    capturer.warm(launch)
    try:
        graph, _ = capturer(launch)
    except RuntimeError:
        return launch, "eager"
    return graph.replay, "graph"


def _events(run: Call, repeats: int) -> list[float]:
    """Return the seconds of each run by the device's clock."""
    pairs = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]
