"""Run a llama.cpp server until standard input closes: the named program, or the package xllamacpp.

It is started by path and imports nothing of this package, whose OpenMP settings must not apply to llama.cpp.
When the parent process ends, in whatever way, the pipe closes and the server stops.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

PATIENCE_S = 5.0
HOST = "127.0.0.1"


def arguments(wanted: Mapping[str, Any]) -> list[str]:
    """Return the settings as `llama-server` arguments; it chooses flash attention itself."""
    given = ["--model", wanted["model"], "--host", HOST, "--port", str(wanted["port"])]
    given += ["--threads", str(wanted["threads"]), "--threads-batch", str(wanted["threads"])]
    given += ["--ctx-size", str(wanted["context"]), "--parallel", str(wanted["slots"]), "--no-kv-unified"]
    given += ["--batch-size", str(wanted["batch"]), "--fit", "off"]
    given += ["--ctx-checkpoints", "0", "--cache-ram", "0"]
    given += ["--log-verbosity", "4"]  # the lowest level that logs the detected CPU features
    given += ["--cache-type-k", wanted["cache"], "--cache-type-v", wanted["cache"]]
    if wanted["drafts"]:
        given += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(wanted["drafts"])]
    if wanted["rates"]:
        given += ["--spec-synth-rates", ",".join(map(str, wanted["rates"]))]
    return given


def parameters(wanted: Mapping[str, Any]) -> Any:
    """Return the settings as xllamacpp's parameters."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path, given.hostnames, given.port = wanted["model"], [HOST], wanted["port"]
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = wanted["threads"]
    given.n_ctx, given.n_parallel, given.kv_unified = wanted["context"], wanted["slots"], False
    given.n_batch, given.fit_params = wanted["batch"], False
    given.n_ctx_checkpoints, given.cache_ram_mib = 0, 0
    form = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{wanted['cache'].upper()}")
    given.cache_type_k, given.cache_type_v = form, form
    if wanted["drafts"]:
        given.load_mtp = True
        given.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        given.speculative.draft.n_max = wanted["drafts"]
    if wanted["rates"]:
        given.speculative.synth_rates = wanted["rates"]
    return given


def serve_program(wanted: Mapping[str, Any]) -> int:
    """Run the program; return its exit code."""
    server = subprocess.Popen([wanted["program"], *arguments(wanted)], stdin=subprocess.DEVNULL)

    def end() -> None:
        sys.stdin.read()
        server.terminate()
        try:
            server.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.kill()

    threading.Thread(target=end, daemon=True).start()
    return server.wait()


def serve_package(wanted: Mapping[str, Any]) -> int:
    """Run the server inside this process."""
    import xllamacpp

    print(f"system_info: {xllamacpp.get_system_info()}", flush=True)
    server = xllamacpp.Server(parameters(wanted))
    sys.stdin.read()
    del server
    return 0


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    sys.exit((serve_program if settings["program"] else serve_package)(settings))
