import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from specdec.bench.gguf_model import refuse_unlike
from specdec.bench.peers import ServerPeer, TransformersPeer, connect, refuse_unknown
from specdec.errors import ConfigError, EngineError
from specdec.models import families
from tests.models.agreeing import CONFIGS
from tests.models.drawn.llama import SCALED

PROMPTS = [[5, 6, 7], [8, 9, 10]]
NEW_TOKENS = 4


@pytest.fixture(scope="module")
def transformers_peer(hybrid: Path) -> TransformersPeer:
    return TransformersPeer(hybrid, dtype=torch.float32, device=torch.device("cpu"))


def test_transformers_peer_equals_generate(transformers_peer: TransformersPeer) -> None:
    sample = transformers_peer.run(PROMPTS, NEW_TOKENS)
    plain = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out_BT = transformers_peer.model.generate(torch.tensor(PROMPTS), max_new_tokens=1 + NEW_TOKENS, **plain)
    assert sample.token_ids == tuple(map(tuple, out_BT[:, 3:].tolist()))
    assert len(sample.step_s) == NEW_TOKENS


def test_judge_agrees_with_the_best_tokens_alone(transformers_peer: TransformersPeer) -> None:
    outputs = transformers_peer.run(PROMPTS, NEW_TOKENS).token_ids
    assert outputs is not None
    assert transformers_peer.judge(PROMPTS, outputs).max() == 0
    wrong = [list(outputs[0]), [*outputs[1][:2], (outputs[1][2] + 1) % 320, *outputs[1][3:]]]
    gap_BT = transformers_peer.judge(PROMPTS, wrong)
    assert gap_BT[0].max() == 0
    assert gap_BT[1, :2].max() == 0
    assert gap_BT[1, 2] > 1e-3


class FakeServer:
    """A server that answers in OpenAI style, with `tokens` tokens in chunks of two."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.bodies, self.url = tokens, [], ""
        self.models = [{"id": "fake"}]
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._complete)])
        runner = web.AppRunner(app)
        self.loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self.loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.ready.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())
        self.loop.close()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": self.models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for _ in range(0, self.tokens, 2):
            await reply.write(b'data: {"choices": [{"text": "ab"}]}\n\n')
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": self.tokens}})
        await reply.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
        return reply


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    server = FakeServer(request.param)
    server.thread.start()
    assert server.ready.wait(10)
    yield server
    server.loop.call_soon_threadsafe(server.loop.stop)
    server.thread.join()


@pytest.mark.parametrize("server", [1 + NEW_TOKENS], indirect=True)
def test_every_prompt_is_sent_greedily(server: FakeServer) -> None:
    peer = ServerPeer(f"{server.url}/v1/")
    sample = peer.run(PROMPTS, NEW_TOKENS)
    assert sample.prefill_s > 0
    assert len(sample.step_s) == 1
    assert sample.token_ids is None
    assert sorted(body["prompt"] for body in server.bodies) == PROMPTS
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("fake", 5, 0)
    peer.run(PROMPTS, NEW_TOKENS)
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == 4, "a prompt that is sent again is not read from the server's prefix cache"


@pytest.mark.parametrize("server", [1], indirect=True)
def test_server_that_stops_early_gives_no_figure(server: FakeServer) -> None:
    with pytest.raises(EngineError, match="1 tokens where 5"):
        ServerPeer(server.url).run(PROMPTS, NEW_TOKENS)


def test_an_unreachable_server_is_named() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1 .*\(nothing answers there\)") as caught:
        ServerPeer("http://127.0.0.1:1").run(PROMPTS, NEW_TOKENS)
    assert caught.value.field == "peers"


@pytest.mark.parametrize("server", [5], indirect=True)
def test_another_kind_of_server_is_explained(server: FakeServer) -> None:
    with pytest.raises(EngineError, match=r"\(it answered 404 Not Found to /elsewhere/v1/models\)"):
        ServerPeer(f"{server.url}/elsewhere").run(PROMPTS, NEW_TOKENS)
    server.models = []
    with pytest.raises(EngineError, match=r"\(its answer lacks the fields of that API\)"):
        ServerPeer(server.url).run(PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize(
    "name", ["http://", "http:///v1", "http://host:port", "http://[::1", "ftp://host", ""]
)
def test_invalid_server_urls_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^--peers: .*such as http://localhost:8000") as caught:
        refuse_unknown([name])
    assert caught.value.field == "peers"


def test_peer_that_is_unknown_is_refused(transformers_peer: TransformersPeer) -> None:
    peers = connect(["transformers", "http://host:1"], transformers_peer)
    assert [peer.name for peer in peers] == ["transformers", "http://host:1"]
    with pytest.raises(ConfigError, match="'vllm'"):
        refuse_unknown(["transformers", "vllm"])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, "sliding attention"),
        ({"rope_parameters": dict(SCALED)}, "scaled rotary frequencies"),
        ({"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8}, "experts"),
        ({"model_type": "llama"}, "the family llama"),
    ],
)
def test_networks_without_a_gguf_writer_are_refused(fields: dict[str, Any], says: str) -> None:
    config = CONFIGS["qwen3"]().to_dict() | {"layer_types": None, "num_experts_per_tok": 2}
    refuse_unlike(families.network(config))
    with pytest.raises(ConfigError, match=says):
        refuse_unlike(families.network(config | fields))
