"""The process that launches kernels reports what fails or hangs in it; the next call runs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest

from sm100_on_hopper.worker import HungError, Worker, WorkerError, WrongError

pytestmark = pytest.mark.cpu


class HangError(Exception):
    """As launch.py raises it."""


def process_id() -> int:
    return os.getpid()


def fail(kind: str) -> None:
    print("words of the driver", file=sys.stderr, flush=True)
    if kind == "wrong":
        raise AssertionError("not the same")
    if kind == "hang":
        raise HangError("a launch did not end")
    if kind == "death":
        os._exit(3)
    raise ValueError("no such thing")


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_calls_run_in_one_other_process(worker: Worker):
    first = worker.call(process_id)
    assert first == worker.call(process_id) != os.getpid()


def test_wrong_numbers_leave_it_running(worker: Worker):
    before = worker.call(process_id)
    with pytest.raises(WrongError, match="not the same"):
        worker.call(fail, "wrong")
    assert worker.call(process_id) == before


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("hang", HungError, "a launch did not end"),
        ("death", WorkerError, "the worker died"),
        ("bug", WorkerError, "no such thing"),
    ],
)
def test_failures_are_told_and_end_it(worker: Worker, kind: str, error: type, words: str):
    before = worker.call(process_id)
    with pytest.raises(error, match=f"(?s){words}.*words of the driver"):
        worker.call(fail, kind)
    assert worker.call(process_id) != before


def test_what_does_not_answer_is_ended(worker: Worker):
    worker.call(process_id)
    start = time.monotonic()
    with pytest.raises(HungError, match="no answer in 0.5 s"):
        worker.call(time.sleep, 60, seconds=0.5)
    assert time.monotonic() - start < 20
    assert worker.call(process_id)
