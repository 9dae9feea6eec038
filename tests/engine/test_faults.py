"""Faults around an engine, and which callers receive them."""

import asyncio
import gc
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import SamplingParams, SpecEngine, Structure
from specdec.core.outputs import Delta, collect
from specdec.core.request import Request
from specdec.errors import EngineError, SpecdecError
from tests.selection import EXHAUSTIVE

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_a_closed_engine_says_so(hybrid: Path) -> None:
    engine = SpecEngine(hybrid)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate("x")


def test_closing_ends_what_still_runs(hybrid: Path) -> None:
    engine = SpecEngine(hybrid)
    errors: list[SpecdecError] = []
    started = threading.Event()

    async def run() -> None:
        try:
            async for _ in engine.stream("x", SamplingParams(max_tokens=500, ignore_eos=True)):
                started.set()
        except SpecdecError as error:
            errors.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    started.wait()
    engine.close()
    thread.join()
    assert len(errors) == 1 and "closed" in str(errors[0])


def test_a_failing_step_fails_the_requests_in_it_and_no_others(hybrid: Path) -> None:
    with SpecEngine(hybrid, max_running=1) as engine:
        network, scheduler = engine.model.network, engine.model.loop.scheduler
        right = network.forward_with_aux
        waiting = threading.Event()

        def fail_once(*arguments: Any) -> object:
            if not scheduler.running:
                return right(*arguments)  # recorded ahead
            waiting.wait()
            network.forward_with_aux = right
            return 1 / 0

        network.forward_with_aux = fail_once
        outcomes: dict[str, object] = {}

        def call(name: str) -> None:
            try:
                outcomes[name] = len(engine.generate(name, GREEDY)[0].token_ids)
            except EngineError as error:
                outcomes[name] = str(error)

        threads = [threading.Thread(target=call, args=(name,)) for name in ("first", "second")]
        threads[0].start()
        while not scheduler.running:
            time.sleep(0.001)
        threads[1].start()
        while engine._worker._inbox.empty():
            time.sleep(0.001)
        waiting.set()
        for thread in threads:
            thread.join()
        assert "ZeroDivisionError" in str(outcomes["first"])
        assert outcomes["second"] == 12
        engine.model.loop.arena.check_integrity()


def test_two_callers_of_a_failed_step_each_get_only_their_own_results(hybrid: Path) -> None:
    """A caller that changes its error must not affect the other's."""
    with SpecEngine(hybrid, max_running=2) as engine:
        network, loop = engine.model.network, engine.model.loop
        right = network.forward_with_aux

        def fail_both(*arguments: Any) -> Any:
            return 1 / 0 if len(loop.scheduler.running) == 2 else right(*arguments)

        network.forward_with_aux = fail_both
        prompts, errors = {"alice": [1, 2, 3], "bob": [7, 8, 9, 10]}, {}

        def call(name: str) -> None:
            try:
                engine.generate(prompts[name], SamplingParams(max_tokens=400, ignore_eos=True))
            except EngineError as error:
                errors[name] = error

        threads = [threading.Thread(target=call, args=(name,)) for name in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors["alice"] is not errors["bob"]
    for name, prompt in prompts.items():
        (own,) = errors[name].completions
        assert own.prompt_token_ids == tuple(prompt) and own.finish_reason == "error"


def test_an_error_shared_by_callers_is_not_modified() -> None:
    """An emitter may send one error to all callers: each caller of `generate` raises its own."""
    shared = EngineError("it failed")
    for prompt in ([1], [2]):
        inbox = queue.SimpleQueue[tuple[int, Delta | SpecdecError]]()
        inbox.put((0, shared))
        with pytest.raises(EngineError, match="it failed") as caught:
            collect([(prompt, 1)], inbox, None, use_tqdm=False)
        assert caught.value.completions[0].prompt_token_ids == tuple(prompt)
    assert shared.completions == ()


@pytest.mark.parametrize("how", ["closed", "abandoned", "stopped"])
def test_each_request_ended_by_the_engine_gets_its_own_error_object(hybrid: Path, how: str) -> None:
    with SpecEngine(hybrid) as engine:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        inbox = queue.SimpleQueue[tuple[int, Delta | SpecdecError]]()
        loop = engine.model.loop
        right, may_go = loop.step, threading.Event()

        def step() -> None:
            if len(loop.scheduler.running) == 2:
                may_go.wait()
                if how == "stopped":
                    raise KeyboardInterrupt
            right()

        loop.step = step
        engine.submit([engine.prepare([own], params) for own in (1, 2)], lambda *said: inbox.put(said))
        while len(loop.scheduler.running) < 2:
            time.sleep(0.001)
        if how == "abandoned":
            engine.abandon("it hangs")
        elif how == "closed":
            engine.close(0)
        may_go.set()
        errors: dict[int, SpecdecError] = {}
        while len(errors) < 2:
            index, item = inbox.get(timeout=60)
            if isinstance(item, SpecdecError):
                errors.setdefault(index, item)
        assert errors[0] is not errors[1] and str(errors[0]) == str(errors[1])


def test_a_failing_output_callback_affects_no_other_request(hybrid: Path) -> None:
    """An event loop that closes while its request runs makes every delivery raise."""
    with SpecEngine(hybrid) as engine:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        event_loop = asyncio.new_event_loop()
        stream = engine.stream("x", params)
        event_loop.run_until_complete(anext(stream))
        event_loop.run_until_complete(event_loop.shutdown_default_executor())
        event_loop.close()
        assert len(engine.generate("y", GREEDY)[0].token_ids) == 12
        assert not engine.model.loop.scheduler.running


def test_a_nan_output_fails_its_request_by_name(hybrid: Path) -> None:
    with SpecEngine(hybrid) as engine:
        network = engine.model.network
        right = network.logits
        network.logits = lambda hidden_TD: right(hidden_TD) * float("nan")
        for params in (GREEDY, SamplingParams(seed=1)):
            with pytest.raises(EngineError, match="NaN"):
                engine.generate("x", params)
        network.logits = right
        assert len(engine.generate("x", GREEDY)[0].token_ids) == 12


def test_exiting_while_the_engine_works_keeps_the_exit_code(hybrid: Path) -> None:
    """A thread that enters C++ during interpreter shutdown aborts the process, even to free a tensor."""
    program = f"""
import threading, time
from specdec import SamplingParams, SpecEngine
engine = SpecEngine({str(hybrid)!r})
params = SamplingParams(max_tokens=500, ignore_eos=True, frequency_penalty=1, allowed_token_ids=[*range(90)])
def work():
    try:
        engine.generate(["a"] * 3, params)
    except Exception:
        pass
for _ in range(6):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
raise SystemExit(3)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 3, ended.stderr.decode()


@EXHAUSTIVE
def test_exiting_while_threads_prepare_requests_keeps_the_exit_code(hybrid: Path) -> None:
    """They are inside torch and the tokenizer most of the time."""
    program = f"""
import threading, time
from specdec import SamplingParams, SpecEngine
engine = SpecEngine({str(hybrid)!r})
params = SamplingParams(max_tokens=2, frequency_penalty=1, allowed_token_ids=[*range(1, 9)])
def work():
    while True:
        try:
            engine.submit([engine.prepare("abc", params)], lambda *_: None)
        except Exception:
            pass
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
raise SystemExit(3)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 3, ended.stderr.decode()


def test_callers_hold_no_tensors(hybrid: Path) -> None:
    """They would free them in their own threads, possibly during interpreter shutdown."""
    params = SamplingParams(
        max_tokens=9, min_tokens=3, bad_words=["ab"], allowed_token_ids=[*range(90)], frequency_penalty=1
    )
    form = SamplingParams(structured_outputs=Structure(regex="a+"))
    with SpecEngine(hybrid) as engine:
        prepared = [engine.prepare("abc", params), engine.prepare("abc", form)]
        ticket = engine.submit(prepared, lambda *_: None)
        held: dict[int, object] = {}
        found: list[object] = [own.terms.limits for own in prepared]
        found += [own.grammar and own.grammar.first for own in prepared] + [vars(ticket)["_numbers"]]
        while found:
            if (one := found.pop()) is not None and id(one) not in held and not isinstance(one, type):
                held[id(one)] = one
                found += gc.get_referents(one)
        assert len(held) > 100 and not any(isinstance(one, torch.Tensor | Request) for one in held.values())


def test_a_dropped_engine_ends_its_thread(hybrid: Path) -> None:
    engine = SpecEngine(hybrid)
    thread = engine._worker._thread
    del engine
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_process_default_type_changes_nothing(hybrid: Path) -> None:
    params = SamplingParams(max_tokens=8, seed=1, top_p=0.9, frequency_penalty=0.3, ignore_eos=True)
    with SpecEngine(hybrid) as engine:
        expected = engine.generate("x", params)[0].token_ids
    torch.set_default_dtype(torch.bfloat16)
    try:
        with SpecEngine(hybrid) as engine:
            assert engine.generate("x", params)[0].token_ids == expected
    finally:
        torch.set_default_dtype(torch.float32)
