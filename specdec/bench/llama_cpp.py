"""llama.cpp as a peer: its server in a separate process, with the same weights in the same precision."""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch

from specdec.bench import llama_server
from specdec.bench.gguf_model import FileType, cached_gguf
from specdec.bench.options import LLAMA_CPP
from specdec.bench.peers import SERVER_TIMEOUT_S, Sample
from specdec.errors import ConfigError, EngineError
from specdec.models.checkpoint import Checkpoint
from specdec.models.files import GGUF_TYPES
from specdec.setup.build import LoadedModel
from specdec.setup.settings import Resolved

PROGRAM = "llama-server"
PACKAGE = "xllamacpp"
ROUNDED: Mapping[str, FileType] = {"int8": "Q8_0", "int4": "Q4_0"}
WIDE: Mapping[torch.dtype, FileType] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
OWN_ENVIRONMENT = ("GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE")
"""Variables that this package sets for its own threads and memory."""
LOADING_S = 300.0
POLL_S = 0.05
LOG_TAIL = 600


def find_program(named: Path | None) -> str | None:
    """Return the llama-server to run, the named one or that on PATH; None: the package xllamacpp.

    Missing packages are refused before anything is loaded.
    """
    if named is not None and not os.access(named, os.X_OK):
        raise ConfigError(
            f"--llama-server: {named} is not an executable file; give the {PROGRAM} of a build of llama.cpp",
            field="llama_server",
        )
    program = str(named) if named is not None else shutil.which(PROGRAM)
    missing = [name for name in ("gguf", PACKAGE) if importlib.util.find_spec(name) is None]
    if missing and not (program and missing == [PACKAGE]):
        raise ConfigError(
            f"--peers {LLAMA_CPP}: it needs {' and '.join(missing)}, not installed here; "
            "run: pip install 'specdec[bench]'",
            field="peers",
        )
    return program


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings that `llama_server.py` starts a server with."""

    program: str | None
    model: str
    kind: str
    threads: int
    slots: int
    context: int
    """Context size of all slots together, in tokens."""
    batch: int
    """Maximum tokens per pass, so that a batch's prompts finish prefill together."""
    cache: str
    drafts: int = 0
    """Draft depth of the model's MTP head; 0: plain decoding."""
    rates: tuple[float, ...] = ()
    """Synthetic acceptance: for each depth, the share of steps that reach it."""


def settings_for(
    checkpoint: Checkpoint,
    model: LoadedModel,
    program: str | None,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
) -> list[ServerSettings]:
    """Return llama.cpp's settings for the same model: without drafts, then with this engine's drafts."""
    own, (file, kind) = model.settings, _file(checkpoint, model.settings)
    drafting = "mtp" in own.drafters and bool(model.network.spec.mtp)
    depth = own.bounds.num_steps if drafting else 0
    # A draft may exceed the last token before it is cut.
    each = prompt_tokens + new_tokens + 1 + depth
    plain = ServerSettings(
        program,
        str(file),
        kind,
        threads=torch.get_num_threads(),
        slots=batch,
        context=batch * -(-each // 256) * 256,
        batch=max(batch * prompt_tokens, 512),
        cache="f32" if kind == "F32" else "f16",
    )
    if not drafting:
        return [plain]
    return [plain, replace(plain, drafts=depth, rates=reached(own.synthetic or (), depth))]


def _file(checkpoint: Checkpoint, own: Resolved) -> tuple[Path, str]:
    """Return the GGUF file for llama.cpp, the model's own or a converted one, and its type."""
    kind = ROUNDED.get(own.quantize) if own.quantize else WIDE.get(own.dtype)
    packed = own.weights if own.weights != own.quantize else None  # published as integers
    if own.device.type == "cpu":
        if checkpoint.gguf_file:
            return checkpoint.gguf_file, str(checkpoint.config[GGUF_TYPES])
        if kind and not packed:
            return cached_gguf(checkpoint.folder, kind), kind
    found = packed or own.quantize or str(own.dtype).removeprefix("torch.")
    raise ConfigError(
        f"--peers {LLAMA_CPP}: it runs on the CPU in float32, float16, bfloat16, int8 or int4, and this "
        f"engine in {found} on {own.device.type}; choose one of them, or leave it out",
        field="peers",
    )


def reached(rates: Sequence[float], depth: int) -> tuple[float, ...]:
    """Convert conditional acceptance rates by depth into the shares of steps that reach each depth."""
    shares = tuple(accumulate(rates, mul))
    return (*shares, *[0.0] * (depth - len(shares))) if shares else ()


def features(said: str) -> list[str]:
    """Parse the CPU features that a server's build uses from its log."""
    found = re.search(r"system_info: .*?CPU : (.*)", said)
    return re.findall(r"(\w+) = 1\b", found[1]) if found else []


class LlamaCppPeer:
    """Greedy decoding by llama.cpp's server, with prefill in one pass; the figures are its own timings.

    They exclude HTTP and JSON, and include the choice of tokens. The server runs until `close`.
    """

    def __init__(self, settings: ServerSettings) -> None:
        """Start the server, and wait until it has loaded the model."""
        self.name = f"{LLAMA_CPP}, draft-mtp" if settings.drafts else LLAMA_CPP
        self.settings, port = settings, _free_port()
        self.url = f"http://{llama_server.HOST}:{port}"
        # Use no proxy for localhost.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._log = tempfile.NamedTemporaryFile("wb")  # noqa: SIM115
        # -P: modules next to the script share names with Python's own.
        self._server = subprocess.Popen(
            [sys.executable, "-P", llama_server.__file__, json.dumps(asdict(settings) | {"port": port})],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in OWN_ENVIRONMENT},
            start_new_session=True,
        )
        try:
            self._wait()
            self.props: Mapping[str, Any] = self.ask("/props")
        except BaseException:
            self.close()
            raise

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Sample:
        """Send all prompts in one request. The step time is a mean: the server reports only the sum."""
        body = {
            "prompt": [list(prompt) for prompt in prompts],
            "n_predict": 1 + new_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        reply = self.ask("/completion", body)
        rows = sorted(reply if isinstance(reply, list) else [reply], key=lambda row: int(row["index"]))
        timings = [row["timings"] for row in rows]
        read = [timing["prompt_n"] for timing in timings]
        written = [len(row["tokens"]) for row in rows]
        if read != [len(prompt) for prompt in prompts] or set(written) != {1 + new_tokens}:
            raise EngineError(
                f"{self.name} read {read} tokens and wrote {written}, where each of {len(prompts)} prompts "
                f"had {len(prompts[0])} and {1 + new_tokens} were asked for; no figure is shown",
                field="peers",
            )
        # Prefill gives the first token; each later one takes a step, unless it was an accepted draft.
        steps = sum(new_tokens - timing.get("draft_n_accepted", 0) for timing in timings)
        decode_s = sum(timing["predicted_ms"] for timing in timings) / 1e3
        return Sample(
            prefill_s=max(timing["prompt_ms"] for timing in timings) / 1e3,
            step_s=(decode_s / steps,),
            token_ids=None if self.settings.rates else tuple(tuple(row["tokens"]) for row in rows),
            tokens_per_step=new_tokens * len(rows) / steps,
        )

    def describe(self) -> dict[str, Any]:
        """Describe the build, the CPU features it detected, and its settings."""
        build = self.settings.program or f"{PACKAGE} {metadata.version(PACKAGE)}"
        kind, threads = self.settings.kind, self.settings.threads
        found = features(self._log_text())
        return {
            "build": build,
            "version": self.props.get("build_info"),
            "features": found,
            "file_type": kind,
            "threads": threads,
            "drafts": self.settings.drafts,
            "note": f"{kind}{' with logits in Q8_0' if kind == 'Q4_0' else ''}, {threads} threads, {build} "
            f"({', '.join(found)}); times are its own",
        }

    def close(self) -> None:
        """Stop the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(2 * llama_server.PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)  # also ends the program it runs
            self._server.wait()
        self._log.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + LOADING_S
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                with self._http.open(f"{self.url}/health", timeout=SERVER_TIMEOUT_S):
                    return
            except OSError:  # not listening yet, or still loading
                time.sleep(POLL_S)
        raise EngineError(
            f"{self.name} did not start with {self.settings.model}; it said: …{self._log_text()[-LOG_TAIL:]}",
            field="peers",
        )

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with self._http.open(request, timeout=SERVER_TIMEOUT_S) as reply:
                return json.load(reply)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"{self.name} did not answer {path} ({error}); it said: …{self._log_text()[-LOG_TAIL:]}",
                field="peers",
            ) from error

    def _log_text(self) -> str:
        return Path(self._log.name).read_text("utf-8", "replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((llama_server.HOST, 0))
        port: int = probe.getsockname()[1]
        return port
