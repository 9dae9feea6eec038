"""Models by name, from a local hub."""

import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from specdec import SamplingParams, SpecEngine
from specdec.config.engine import EngineConfig
from specdec.config.folders import model_name
from specdec.errors import CheckpointError
from specdec.models.files import HEAD_FOLDERS, INDEX, SINGLE
from specdec.models.folder import SHIPPED, describable, find_folder, find_models
from specdec.models.hub import repository, transfer
from specdec.models.hub.cached import find_cached
from specdec.models.hub.names import HubName
from specdec.models.hub.repository import Repository
from specdec.models.hub.snapshot import MOST_INFO_BYTES
from specdec.setup.footprint import describe_model
from tests.models.hub_server import Hub, Repo, serve
from tests.selection import EXHAUSTIVE

ROOT = Path(__file__).parents[2]
TINY = SHIPPED["tiny"]
NAME = "specdec/tiny"
READ = [
    *("config.json", "eagle3/config.json", "eagle3/model.safetensors", "model.safetensors"),
    *("token_counts.json", "tokenizer.json", "tokenizer_config.json"),
]
UNREAD = {
    **{"model.py": b"raise SystemExit", "pytorch_model.bin": b"x", "original/model.safetensors": b"x"},
    **{"consolidated.safetensors": b"x", "onnx/model.onnx": b"x", "training_args.pt": b"x"},
}
PARAMS = SamplingParams(max_tokens=24, temperature=0.0)
SMALL = {"config.json": b"{}", "tokenizer.json": b"[]"}
WEIGHTS = bytes(range(256)) * 2000
"""Large enough to be stored separately."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Serve a hub; huggingface_hub reads its variables at import, so the constants are set instead."""
    with serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        hub.repos[NAME] = Repo.of(TINY, **UNREAD)
        yield hub
        huggingface_hub.close_session()


@pytest.fixture(scope="module")
def expected() -> str:
    """Return the output of the folder's model."""
    return complete("tiny")


def complete(model: str | Path, **fields: object) -> str:
    with SpecEngine(model, memory_bytes="64MiB", max_model_len=256, **fields) as engine:
        return engine.generate("def fib(n):", PARAMS)[0].text


def test_a_name_serves_as_its_folder_does_and_is_downloaded_once(
    hub: Hub, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert complete(NAME) == expected
    assert hub.fetched() == READ
    folder = find_folder(f"{NAME}@main")
    assert (folder.name, model_name(folder), model_name(TINY)) == (hub.repos[NAME].commit, NAME, "tiny")
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == READ
    assert find_folder(f"{NAME}@v1") == find_folder(f"{NAME}@{folder.name}") == folder
    assert hub.fetched() == READ and hub.asked[-1][1] == "api"

    # A new commit downloads changed files only; without the hub, main resolves to it.
    hub.repos[NAME].files["generation_config.json"] = b"{}"
    newer = find_folder(NAME)
    assert hub.fetched() == sorted([*READ, "generation_config.json"]) and newer != folder
    count, hub.status = len(hub.asked), 503
    assert find_folder(NAME) == newer and "the cached copy" in caplog.text
    hub.status = 404
    assert find_folder(NAME) == newer and "has no model of that name (404" in caplog.text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_folder(NAME) == newer and find_folder(f"{NAME}@v1") == folder and len(hub.asked) == count
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE prevents") as refused:
        find_folder("specdec/other")
    assert refused.value.field == "model"


def test_a_snapshot_in_part_is_refused_where_the_hub_is_out_of_reach(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = {f"model-{i}-of-2.safetensors": bytes(i) for i in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}).encode()
    more = {"tokenizer_config.json": b"{}", "eagle3/config.json": b"{}", "eagle3/model.safetensors": b"x"}
    repo = hub.repos["a/b"] = Repo({**SMALL, **shards, **more, INDEX: index, "README.md": b"x"})

    # A snapshot looks incomplete until each of its files, including the last, is linked.
    linked: list[str] = []
    download = Repository._link

    def link(self: Repository, file: str) -> None:
        cached = find_cached(HubName("a/b", repo.commit))
        assert cached is None or cached.lacks
        linked.append(file)
        download(self, file)

    monkeypatch.setattr(Repository, "_link", link)
    monkeypatch.setattr(repository, "FILES_AT_ONCE", 1)
    folder = find_folder("a/b")
    assert sorted(linked) == sorted({*repo.files} - {"README.md"}) and linked[-2:] == [*shards]

    # Other programs link in any order; their record of a commit's files also shows what it lacks.
    hub.status = 503
    for gone, said in (
        ("config.json", "lacks config.json, and http"),
        ("tokenizer.json", "lacks tokenizer.json"),
        ("eagle3/model.safetensors", "lacks eagle3/model.safetensors"),
        ("model-2-of-2.safetensors", r"lacks model-2-of-2.safetensors, .* answered 503 .* give the path of"),
        (INDEX, "lacks model.safetensors"),
    ):
        (folder / gone).rename(folder.parent / "gone")
        with pytest.raises(CheckpointError, match=said) as refused:
            find_folder("a/b")
        assert str(folder) in str(refused.value)
        (folder.parent / "gone").rename(folder / gone)
        assert find_folder("a/b") == folder
    (folder / INDEX).unlink()
    (folder / INDEX).write_text("damaged")
    with pytest.raises(CheckpointError, match=f"lacks a {INDEX} that can be read"):
        find_folder("a/b")
    (folder / INDEX).write_bytes(index)
    trees = folder.parents[1] / "trees"
    trees.mkdir()
    listed = {"format_version": 1, "files": {file: {} for file in [*repo.files, "chat_template.jinja"]}}
    (trees / f"{folder.name}.json").write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match=r"lacks chat_template.jinja"):
        find_folder("a/b")
    (trees / f"{folder.name}.json").write_text("damaged")
    assert find_folder("a/b") == folder


def test_a_folder_of_that_name_comes_first(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert find_folder(NAME) == Path(NAME) and find_folder("tiny") == TINY
    assert not hub.asked


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3.5-0.8B", ("Qwen/Qwen3.5-0.8B", "main")),
        ("a_b/c@refs/pr/1", ("a_b/c", "refs/pr/1")),
        ("https://huggingface.co/Qwen/Qwen3.5-0.8B", ("Qwen/Qwen3.5-0.8B", "main")),
        ("https:/huggingface.co/a/b/tree/refs/pr/1", ("a/b", "refs/pr/1")),
        *(
            (f"{host}a/b", ("a/b", "main"))
            for host in ("hf.co/", "http://www.huggingface.co/", "https://hf.co/", "hf://", "hf:/")
        ),
        ("hf.co/a/b/", ("a/b", "main")),
        *(
            (text, None)
            for text in ("hf.co/a", "hf.co/a/b/c", "https://hf.co.evil/a/b", "hf.co/a/../b", "ollama.com/a")
        ),
        *((text, None) for text in ("tiny", "/a/b", "./a", "../a", "a/b/c", "a/", "a/b@", "a/b@../../c")),
        *(
            (text, None)
            for text in ("a--b/c", "a/b.", "a/b c", "a/b\n", "~/a", f"a/{'b' * 95}", "http://a/b")
        ),
    ],
)
def test_hub_names_are_distinguished_from_paths(text: str, name: tuple[str, str] | None) -> None:
    assert HubName.read(text) == (name and (*name, None))


def test_an_interrupted_download_resumes(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = hub.repos["a/b"] = Repo({**SMALL, SINGLE: WEIGHTS})
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(transfer, "RETRIES", 1)
    repo.cuts[SINGLE] = [300_000, 100_000, 0, 0]
    with pytest.raises(CheckpointError, match=r"cannot be reached for a/b .*run this again"):
        find_folder("a/b")
    ranges = [asked for method, file, asked in hub.asked if (method, file) == ("GET", SINGLE)]
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointError, match=r"its download to \S+a--b was interrupted, .* unset it"):
            find_folder("a/b")
    assert ranges == ["", "bytes=300000-", "bytes=400000-", "bytes=400000-"]
    hub.asked.clear()
    hub.sent = 0
    folder = find_folder("a/b")
    assert ("GET", SINGLE, "bytes=400000-") in hub.asked and hub.sent < len(WEIGHTS) - 399_000
    assert (folder / SINGLE).read_bytes() == WEIGHTS
    assert not list(folder.parents[1].rglob("*.incomplete"))


def test_files_that_differ_from_the_hubs_description_are_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.0)
    repo = hub.repos["a/b"] = Repo({**SMALL, SINGLE: WEIGHTS})
    for wrong, said in ((WEIGHTS[1:] + b"?", "SHA-256"), (WEIGHTS + b"?", "goes on"), (WEIGHTS[:9], "ends")):
        repo.swaps[SINGLE] = wrong
        with pytest.raises(CheckpointError, match=said):
            find_folder("a/b")
    repo.swaps.clear()
    assert (find_folder("a/b") / SINGLE).read_bytes() == WEIGHTS


def test_oversized_text_files_and_files_of_another_commit_are_not_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repository, "MOST_TEXT_BYTES", 1000)
    repo = hub.repos["a/b"] = Repo({**SMALL, SINGLE: WEIGHTS, "tokenizer.json": b" " * 1001})
    with pytest.raises(CheckpointError, match=r"tokenizer.json has 1,001 bytes .*, more than 1,000"):
        find_folder("a/b")
    repo.files["tokenizer.json"] = b" " * 1000
    repo.told = "c" * 40
    with pytest.raises(CheckpointError, match=f"of commit 'c{{40}}', not of {repo.commit}"):
        find_folder("a/b")
    assert not hub.fetched() and not list(Path(constants.HF_HUB_CACHE).rglob("snapshots/*/*"))
    repo.told = None
    assert (find_folder("a/b") / "tokenizer.json").stat().st_size == 1000


def test_connections_that_give_next_to_nothing_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = hub.repos["a/b"] = Repo({**SMALL, SINGLE: WEIGHTS})
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.0)
    repo.cuts[SINGLE] = [1] * 99
    with pytest.raises(CheckpointError, match=r"cannot be reached for a/b .*run this again"):
        find_folder("a/b")
    assert len(repo.cuts[SINGLE]) == 99 - 1 - transfer.RETRIES
    repo.cuts.clear()
    repo.trickles.add(SINGLE)
    monkeypatch.setattr(transfer, "SLOW_S", 0.02)
    with pytest.raises(CheckpointError, match=r"too slow: [1-9]\d* bytes came in 0.02 s"):
        find_folder("a/b")
    with pytest.raises(CheckpointError, match="too slow"), describable("a/b", EngineConfig()):
        pass


def test_a_range_other_than_requested_is_dropped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(1).randbytes(100_000)  # small enough to have no announced SHA-256
    repo = hub.repos["a/b"] = Repo({**SMALL, SINGLE: content})
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.0)
    for other in ("bytes=500-99899", "bytes=700-"):
        repo.cuts[SINGLE], repo.spans[SINGLE] = [600], ["", other]
        folder = find_folder("a/b")
        assert (folder / SINGLE).read_bytes() == content and not repo.spans[SINGLE]
        shutil.rmtree(folder.parents[1])
    repo.spans[SINGLE] = ["bytes=1-"]
    with pytest.raises(CheckpointError, match="another byte range"), describable("a/b", EngineConfig()):
        pass


def test_only_shards_in_the_index_are_downloaded(hub: Hub) -> None:
    shards = {f"model-{i}-of-2.safetensors": bytes(LARGE * i) for i, LARGE in ((1, 200_000), (2, 100))}
    index = json.dumps({"weight_map": dict(zip("abc", (*shards, *shards), strict=False))}).encode()
    files = {**SMALL, **shards, INDEX: index, "model-old.safetensors": b"x", "pytorch_model.bin": b"x"}
    hub.repos["a/b"] = Repo(files)
    find_folder("a/b")
    assert hub.fetched() == sorted([*SMALL, *shards, INDEX])
    del hub.repos["a/b"].files["model-2-of-2.safetensors"]
    with pytest.raises(CheckpointError, match=r"lacks model-2-of-2.safetensors, which its .* names"):
        find_folder("a/b")


def gate(hub: Hub) -> None:
    hub.repos["a/b"] = Repo(SMALL, token="hf_right", gated=True)


def gate_with_token(hub: Hub) -> None:
    gate(hub)
    Path(constants.HF_TOKEN_PATH).write_text("hf_wrong")


def hide(hub: Hub) -> None:
    hub.repos["a/b"] = Repo(SMALL, token="hf_right")


def hold(**files: bytes) -> Callable[[Hub], None]:
    return lambda hub: hub.repos.update({"a/b": Repo({**SMALL, **files})})


def befall(**what: object) -> Callable[[Hub], None]:
    return lambda hub: vars(hub).update(what)


OUTSIDE = '{"sha": "%s", "siblings": [{"rfilename": "%%s"}]}' % ("0" * 40)
"""Hub description of a repository with one file of a given name."""


@pytest.mark.parametrize(
    ("arrange", "name", "said"),
    [
        (gate, "a/b", r"^a/b is gated: accept its licence at http://.*/a/b, then log in .* HF_TOKEN$"),
        (gate_with_token, "a/b", r"^a/b is gated: accept its licence at "),
        (hide, "a/b", r"^a/b is not a folder here, and http://\S+ shows no model of that name: check the"),
        (befall(), "no/such", r"^no/such is not a folder here, and .* if it is private, log in with"),
        (befall(), f"{NAME}@v9", r"^specdec/tiny has no revision v9; http\S+/specdec/tiny/commits lists"),
        (befall(garbage=True), NAME, r"does not answer for specdec/tiny as a Hugging Face hub does \(.*HF_E"),
        (befall(info=b"[" * 10**5), NAME, r"does not answer for specdec/tiny as .*recursion"),
        (befall(info=b'{"sha": "..", "siblings": []}'), NAME, r"does not answer .*it names no commit"),
        (befall(info=b" " * (MOST_INFO_BYTES + 1)), NAME, r"does not answer .*it says more than 67,108,864"),
        (befall(status=503), NAME, r"^http://\S+ answered 503 for specdec/tiny; run this again later$"),
        (befall(status=401), NAME, r"log in with `hf auth login`, or set HF_TOKEN"),
        (hold(**{"pytorch_model.bin": b"x"}), "a/b", r"only pickle weights \(pytorch_model.bin\), which are"),
        (hold(**{"b-Q4.h5": b"x"}), "a/b", r"has neither model.safetensors nor .*, only b-Q4.h5; name a"),
        (hold(**{"b-Q4.gguf": b"x"}), "a/b", r"^b-Q4.gguf: it ends in the middle of its first bytes; down"),
        (befall(info=(OUTSIDE % "/x.gguf").encode()), NAME, r"does not answer .*it names files outside"),
        (befall(info=(OUTSIDE % "a/../../x.gguf").encode()), NAME, r"does not answer .*names files outside"),
        (hold(**{INDEX: b"[" * 10**5}), "a/b", r"does not answer for a/b as a Hugging Face hub does"),
        (hold(**{INDEX: b"?"}), "a/b", r"does not answer for a/b as a Hugging Face hub does"),
        (
            hold(**{INDEX: b'{"weight_map": {"a": "../b"}}'}),
            "a/b",
            r"which are not safetensors in its folder",
        ),
    ],
)
def test_every_failure_names_a_remedy(hub: Hub, arrange: Callable[[Hub], None], name: str, said: str) -> None:
    arrange(hub)
    with pytest.raises(CheckpointError, match=said) as refused:
        find_folder(name)
    assert refused.value.field == "model" and "\n" not in str(refused.value)
    with pytest.raises(CheckpointError, match=r"^draft_model: ") as refused:
        find_models("tiny", EngineConfig(draft="eagle", draft_model=name))
    assert refused.value.field == "draft_model"


def test_a_password_in_the_mirrors_address_is_not_shown(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(transfer, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address.replace("//", "//user:s3cret@"))
    repo = hub.repos["a/b"] = Repo({**SMALL, SINGLE: WEIGHTS})
    repo.cuts[SINGLE] = [10, 0]
    find_folder("a/b")
    repo.files["tokenizer.json"] = b"[1]"
    repo.swaps[SINGLE] = repo.swaps["tokenizer.json"] = b"other"
    said = []
    for what in ({}, {"status": 503}, {"status": 401}, {"status": 404}, {"garbage": True}):
        vars(hub).update(what)
        with pytest.raises(CheckpointError) as refused:
            find_folder("no/such")
        said.append(str(refused.value))
        with contextlib.suppress(CheckpointError):
            find_folder("a/b")
    assert "trying again" in caplog.text and not any("user" in text for text in said)
    assert not any("s3cret" in text for text in (caplog.text, *capfd.readouterr()))


def test_a_token_opens_private_repositories_and_is_sent_to_the_hub_only(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME].token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    find_folder(NAME)
    assert hub.fetched() == READ


def test_a_disk_or_a_cache_that_cannot_hold_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needed = sum(len(hub.repos[NAME].files[file]) for file in READ)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
        with pytest.raises(CheckpointError, match=rf"{needed:,} bytes .*cache, where .*HF_HOME") as refused:
            find_folder(NAME)
    assert refused.value.field == "model" and not hub.fetched()
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be kept in .* set HF_HOME to a folder that can"):
        find_folder(NAME)


def test_a_draft_head_by_name(hub: Hub, expected: str) -> None:
    hub.repos["specdec/head"] = Repo.of(TINY / next(iter(HEAD_FOLDERS)))
    assert complete("tiny", draft="eagle", draft_model="specdec/head") == expected
    assert hub.fetched() == ["config.json", "model.safetensors"]


def test_a_description_downloads_headers_alone(hub: Hub) -> None:
    with describable(NAME, EngineConfig(draft_vocab=128)) as (folder, config):
        found = describe_model(folder, config, [64])
        assert model_name(folder) == NAME
    assert found == describe_model("tiny", config, [64])
    assert not folder.exists() and hub.sent < 500_000 < len(hub.repos[NAME].files[SINGLE])
    whole = find_folder(NAME)
    with describable(NAME, EngineConfig()) as (folder, _):
        assert folder == whole
    hub.repos["a/b"] = Repo({**SMALL, SINGLE: bytes(9)})
    with pytest.raises(CheckpointError, match="no safetensors file"), describable("a/b", EngineConfig()):
        pass


@EXHAUSTIVE
def test_the_command_resumes_an_interrupted_download(expected: str, tmp_path: Path) -> None:
    with serve() as hub:
        hub.repos[NAME] = Repo.of(TINY)
        hub.repos[NAME].stalls.add(SINGLE)
        environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "specdec", "generate", NAME, "--prompt", "def fib(n):"]
        command += ["--max-tokens", "8", "--temperature", "0", "--memory-bytes", "64MiB", "--json"]
        ran = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert hub.going.wait(60)
        ran.send_signal(signal.SIGINT)
        assert (*ran.communicate(timeout=60), ran.returncode) == ("", "", 130)
        hub.repos[NAME].stalls.clear()
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert any(file == SINGLE and asked for _, file, asked in hub.asked)
    assert expected.startswith(json.loads(done.stdout)["text"])
