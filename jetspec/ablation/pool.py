"""Worker processes that take one task after another; nothing heavy is imported before a task."""

import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from jetspec.errors import JetspecError
from jetspec.kept import keeping

_VISIBLE = "CUDA_VISIBLE_DEVICES"  # CUDA's own way to give a process one of several GPUs
_study: Connection | None = None  # of a worker, to who asked for its task


class _Told(str):
    """Something that a task says while it goes on."""


def tell_study(text: str) -> None:
    """Say something to the study that asked for this process's task; elsewhere nobody listens."""
    if _study is not None:
        _study.send(_Told(text))


class Pool:
    """At most `size` processes, each started when there is work for it.

    Args:
        threads: of torch, in every process.
        gpus: as CUDA names them; workers take them in turn.

    Attributes:
        running: tasks that are being done, by name.
        heard: called with a task's name and what it tells (`tell_study`) while answers are awaited.
    """

    def __init__(self, size: int, *, threads: int = 1, gpus: Sequence[str] = ()) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._threads = threads
        self._free = [gpus[i % len(gpus)] if gpus else None for i in range(size)]
        self._rested: list[_Worker] = []
        self.running: dict[str, _Worker] = {}
        self.heard: Callable[[str, str], None] = lambda name, text: None

    @property
    def idle(self) -> bool:
        """Whether a worker could take a task."""
        return bool(self._rested or self._free)

    def ask(self, name: str, task: Callable[..., Any], *arguments: Any) -> None:
        """Give an idle worker a task; all of it must pickle."""
        if self._rested:
            worker = self._rested.pop()
        else:
            worker = _Worker(self._context, self._free.pop(0), self._threads)
        self.running[name] = worker
        worker.connection.send((task, arguments))

    def answers(self, stop_at: float | None = None) -> list[tuple[str, Any]]:
        """(name, what the task returned or raised) of at least one task.

        Args:
            stop_at: of `time.monotonic()`; none is returned if nothing is done by then.
        """
        found: list[tuple[str, Any]] = []
        while self.running and not found:
            left = None if stop_at is None else max(0.0, stop_at - time.monotonic())
            names = {worker.connection: name for name, worker in self.running.items()}
            ready = wait(list(names), left)
            if not ready:
                break
            found = self._received([names[connection] for connection in ready])
        return found

    def _received(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        """The answers among what these tasks have sent, each one thing."""
        found: list[tuple[str, Any]] = []
        for name in names:
            worker = self.running[name]
            try:
                said = worker.connection.recv()
            except (EOFError, OSError):
                worker.process.join()
                code = worker.process.exitcode
                said = JetspecError("worker", f"exit code {code}", "died; run again to go on")
                self._free.append(worker.gpu)
            else:
                if isinstance(said, _Told):
                    self.heard(name, str(said))
                    continue
                self._rested.append(worker)
            del self.running[name]
            found.append((name, said))
        return found

    def close(self) -> None:
        """End every worker, whatever it is doing."""
        for worker in (*self._rested, *self.running.values()):
            worker.process.terminate()
            worker.process.join()
        self._rested, self.running = [], {}


class _Worker:
    def __init__(self, context: Any, gpu: str | None, threads: int) -> None:
        self.gpu = gpu
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, gpu, threads))
        self.process.start()
        there.close()


def _serve(connection: Connection, gpu: str | None, threads: int) -> None:
    """A worker's life: do what is asked until nobody asks any more."""
    if gpu is not None:
        os.environ[_VISIBLE] = gpu  # before CUDA is used in this process
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is imported
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    global _study
    _study = connection
    with keeping():  # what the next task may ask for again
        _take_tasks(connection)


def _take_tasks(connection: Connection) -> None:
    while True:
        try:
            task, arguments = connection.recv()
        except EOFError:
            return
        answer: Any
        try:
            answer = task(*arguments)
        except JetspecError as error:
            answer = error
        except Exception as error:  # whatever one task dies of must not end the others
            answer = JetspecError("variant", type(error).__name__, str(error))
        connection.send(answer)
        del task, arguments, answer
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def _end_with(parent: int) -> None:
    """A worker whose study was killed must not go on by itself."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def visible_gpus(count: int) -> list[str]:
    """The machine's GPUs as CUDA names them, those that this process may see."""
    given = os.environ.get(_VISIBLE)
    return given.split(",")[:count] if given else [str(i) for i in range(count)]
