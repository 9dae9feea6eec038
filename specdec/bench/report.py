"""Shared by all benchmarks: machine description, summaries of samples, tables and the JSON line."""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from specdec.errors import ConfigError


class SampleSummary(NamedTuple):
    median: float
    p10: float
    p90: float


def summarise(samples: Sequence[float]) -> SampleSummary:
    """Return the median, p10 and p90 of the samples."""
    return SampleSummary(statistics.median(samples), percentile(samples, 0.1), percentile(samples, 0.9))


def percentile(samples: Sequence[float], fraction: float) -> float:
    """Interpolate linearly between the two samples nearest to the fraction."""
    ordered = sorted(samples)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class Interruption:
    """Whether Ctrl-C ended a measurement."""

    happened = False


@contextmanager
def until_interrupted(results: Sized) -> Iterator[Interruption]:
    """End a measurement on Ctrl-C if it has results; otherwise let the exception through."""
    interruption = Interruption()
    try:
        yield interruption
    except KeyboardInterrupt:
        if not results:
            raise
        interruption.happened = True


def environment() -> dict[str, Any]:
    """Return the machine and the software versions."""
    import torch  # imported late: without torch the other benchmarks still explain what is missing

    versions = {name: _version(name) for name in ("specdec", "torch", "transformers", "triton")}
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "commit": commit(),
        "machine": platform.platform(),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "gpu": device,
        "versions": {"python": platform.python_version(), **versions},
    }


def setup_line(report: Mapping[str, Any]) -> str:
    """Format the machine, the versions and the commit of a report."""
    machine = report["gpu"] if report["device"] != "cpu" else f"{report['cpu']}, {report['threads']} threads"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    return f"{machine}; {versions}; commit {report['commit']}"


def commit() -> str | None:
    """Return the commit of the sources, with `+` if they are modified; None outside a clone."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def cpu_model() -> str:
    """Return the processor's name as reported by the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Format rows with equal keys as columns: text left-aligned, figures right-aligned."""
    columns = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}

    def line(row: Mapping[str, str]) -> str:
        cells = [
            row[name].ljust(widths[name]) if is_text else row[name].rjust(widths[name])
            for name, is_text in zip(columns, text, strict=True)
        ]
        return "  ".join(cells).rstrip()

    text = [any(cell[:1].isalpha() for cell in (row[name] for row in rows)) for name in columns]
    rule = {name: "-" * widths[name] for name in columns}
    return "\n".join([line({name: name for name in columns}), line(rule), *map(line, rows)])


def json_line(report: Mapping[str, Any]) -> str:
    """Serialise a report as one line, rounding figures to six digits."""
    return json.dumps(_rounded(report), separators=(", ", ": "))


@dataclass(frozen=True, slots=True)
class ReportOutput:
    """The report's destinations beside the table: a file or folder (--out), standard output (--json)."""

    path: Path | None = None
    as_json: bool = False

    def within(self, name: str) -> "ReportOutput":
        """Return the output for one file of the folder."""
        return replace(self, path=self.path / name) if self.path else self


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json` to a benchmark's options."""
    parser.add_argument(
        "--json", action="store_true", help="print the report as one JSON line; the table goes to stderr"
    )


def publish(shown: str, report: Mapping[str, Any], out: ReportOutput) -> None:
    """Print the table, or with `--json` the report and the table on stderr; write the report to `--out`.

    If writing fails, the report is printed, so that no measurement is lost.
    """
    line = json_line(report)
    print(shown, file=sys.stderr if out.as_json else sys.stdout, flush=True)
    if out.as_json:
        print(line, flush=True)
    if out.path is None:
        return
    try:
        out.path.write_text(f"{line}\n", "utf-8")
    except OSError as error:
        if not out.as_json:
            print(line, flush=True)
        raise ConfigError(
            f"--out: {out.path} cannot be written ({error.strerror}); the report is printed above",
            field="out",
        ) from error


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.6g}")
        case Mapping():
            return {key: _rounded(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_rounded(inner) for inner in value]
        case _:
            return value
