"""Timing on a GPU, whose driver is a double here."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch

from anymla.benchmarking import timing
from anymla.benchmarking.timing import captured, host_seconds, time_in_turns

GPU = torch.device("cuda")


class Graph:
    """Counts its replays."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


class Event:
    """Reads a clock that only the work on the device moves."""

    clock_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.clock_ms

    def synchronize(self):
        """Nothing is behind."""

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def driver(monkeypatch):
    """A driver that captures by doing nothing, and memory on no device."""
    seen: list[str] = []

    @contextmanager
    def graph(made):
        seen.append("capture")
        yield

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("synchronize"))
    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))
    return seen


def test_a_captured_call_runs_once_and_is_replayed_after_that(driver):
    ran = []
    replay = captured(lambda: ran.append(1), GPU)
    assert driver == ["synchronize", "capture"] and ran == [1]
    replay()
    replay()
    assert ran == [1] and replay.graph.replays == 2


def test_the_memory_of_a_captured_call_lives_as_long_as_its_replay(driver):
    class Memory:
        """What a plan has allocated."""

    memory = Memory()
    alive = weakref.ref(memory)
    replay = captured(lambda memory=memory: memory, GPU)
    del memory
    gc.collect()
    assert alive() is not None
    del replay
    gc.collect()
    assert alive() is None


def test_a_call_on_a_cpu_is_not_captured():
    def call(): ...

    assert captured(call, torch.device("cpu")) is call


def test_the_time_of_a_device_is_that_between_its_events(driver):
    def work():
        Event.clock_ms += 0.25

    found = time_in_turns({"work": work}, GPU, repeats=3)["work"]
    assert found.seconds == (0.25e-3,) * 3


def test_the_host_is_timed_with_an_empty_queue(driver):
    found = host_seconds(lambda: driver.append("call"), GPU, repeats=2)
    assert driver == ["synchronize", "call"] * 5
    assert len(found.seconds) == 2 and found.median_us >= 0
