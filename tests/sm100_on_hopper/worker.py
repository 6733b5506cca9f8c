"""A process that launches kernels: one that hangs or stops takes only that process along."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CALL_SECONDS = 120.0  # with imports and compiling; launches have a time-out of their own
START_SECONDS = 120.0
END_SECONDS = 30.0
LOG_LENGTH = 1500  # of what the worker printed, its end


class WorkerError(RuntimeError):
    """A call failed in the worker; the message has its words and what the kernel printed."""


class WrongError(WorkerError):
    """A function in the worker found something wrong; the worker goes on."""


class HungError(WorkerError):
    """A kernel, or all of the worker, did not end in time."""


def serve(connection: Connection, log: str) -> None:
    """Answer calls until one fails: a kernel that stopped leaves a context that is of no use."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    connection.send(("ready", None))
    while True:
        try:
            module, function, arguments, options = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            called = getattr(importlib.import_module(module), function)
            connection.send(("value", called(*arguments, **options)))
        except AssertionError as error:  # wrong numbers: the next call may be right
            connection.send(("wrong", _described(error)))
        except BaseException as error:
            kind = "hung" if type(error).__name__ == "HangError" else "failed"
            connection.send((kind, _described(error)))
            sys.stderr.flush()
            # Not the usual way out: destructors would wait for a kernel that never ends.
            os._exit(1)


def _described(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-3:])


class Worker:
    """Calls functions in a process of its own, started at the first call and after failures."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="sm100-worker-")
        self._log = Path(self._folder.name, "stderr")

    def call(self, function: Any, *arguments: Any, seconds: float = CALL_SECONDS, **options: Any):
        """Call a function that is found by module and name; returns its value.

        Raises: HungError, WorkerError.
        """
        if self._process is None:
            self._start()
        self._connection.send((function.__module__, function.__qualname__, arguments, options))
        kind, value = self._receive(seconds)
        if kind == "value":
            return value
        if kind == "wrong":
            raise WrongError(value)
        self.stop()
        raise (HungError if kind == "hung" else WorkerError)(value + self._printed())

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.join(END_SECONDS)
            self._connection.close()
            self._process = self._connection = None

    def close(self) -> None:
        """End the process and forget what it printed."""
        self.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._log.write_text("")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, str(self._log))
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        kind, value = self._receive(START_SECONDS)
        if kind != "ready":
            self.stop()
            raise WorkerError(f"the worker did not start: {value}{self._printed()}")

    def _receive(self, seconds: float) -> tuple[str, Any]:
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
        except (EOFError, ConnectionResetError):
            return "failed", "the worker died\n"
        return "hung", f"no answer in {seconds} s\n"

    def _printed(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n" + text[-LOG_LENGTH:]
