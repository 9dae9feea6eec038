"""The prefill work equals that of its matrices, attention and recurrences, counted independently."""

from specdec.bench.random_model import shape_config
from specdec.models.families import network
from specdec.models.mixers import Attention
from specdec.models.work import ReadingWork


def test_work_is_that_of_each_token_and_each_pair() -> None:
    spec = network(shape_config("nemotron-h-8b"))
    work = ReadingWork.of(spec)
    wide = sum(mixer.heads * mixer.head_dim for mixer in spec.mixers() if isinstance(mixer, Attention))
    assert work(0) == 0
    for tokens in (1, 63, 4096):
        further = work(tokens + 1) - work(tokens)
        assert further == work(1) + 4 * wide * tokens
    # Eight billion parameters less two embeddings of half a billion, with one multiply-add each.
    assert 0.95 < work(1) / (2 * (8.1e9 - 2 * 131072 * 4096)) < 1.15
