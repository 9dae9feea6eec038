"""What a replica reports about itself is read from its metrics; anything else counts as zero."""

import pytest

from specdec.ray.figures import Figures, read_figures


def line(name: str, value: str) -> bytes:
    return f'vllm:{name}{{model_name="m",engine="0"}} {value}\n'.encode()


def test_models_are_summed_and_the_fullest_arena_counts() -> None:
    waiting = line("num_requests_waiting", "2.0") + line("num_requests_waiting", "3")
    running = b"vllm:num_requests_running 4\n"
    usage = line("kv_cache_usage_perc", "0.5") + line("kv_cache_usage_perc", "0.25")
    assert read_figures(b"# HELP x\n" + waiting + running + usage) == (5.0, 4.0, 0.5)


@pytest.mark.parametrize("value", ["1.2.3", "e", "1e999", "-1", "NaN", "+Inf", "", "1e300"])
def test_numbers_that_are_none_count_as_zero(value: str) -> None:
    told = read_figures(line("kv_cache_usage_perc", value) + line("num_requests_waiting", value))
    assert told.waiting == told.running == 0 and 0 <= told.arena <= 1


def test_other_text_has_no_figures() -> None:
    assert read_figures(b"\xff\x00 nothing of ours\n") == Figures()
