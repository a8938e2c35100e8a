"""The process of a `ForkServer`: it has imported modules, and forks a process with them for each request.

It starts no threads, and computes nothing: a process with threads cannot be forked safely.

Between it and each process is a keeper. It adopts what the process leaves behind, such as jobs in the
background: it reaps them when they end, and kills them when the process has ended. Both have a group of their
own, since users' code may signal the group in which it finds itself.
"""

import ctypes
import gc
import importlib
import os
import random
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from oat.processes.child import function_of, write_to
from oat.processes.marks import VARIABLE, end_group, processes
from oat.processes.pipe import Message, Pipe

_PR_SET_CHILD_SUBREAPER = 36


def serve(pipe: Pipe, order: Mapping[str, Any]) -> None:
    """Answer requests until the connection ends.

    Args:
        order: `modules` are imported first. If `log` is not "", it is a file of what the processes print.
    """
    if order["log"]:
        write_to(order["log"])
    adopt_orphans()
    for name in order["modules"]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would write to all pages that it shares with this process
    _Server(pipe).serve()


class _Server:
    def __init__(self, pipe: Pipe):
        self._pipe = pipe
        self._forked: dict[int, int] = {}
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def serve(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                ready, _, _ = select.select([self._pipe.fileno(), self._woken], [], [])
                self._reap()
                if self._pipe.fileno() in ready:
                    self._do(self._pipe.receive())
        for keeper in self._forked:
            end_group(keeper)
        _end_children(set())

    def _do(self, message: Message) -> None:
        request = msgspec.msgpack.decode(message.head)
        number = request["number"]
        if request["what"] == "end":
            for keeper in [each for each, its in self._forked.items() if its == number]:
                end_group(keeper)  # its process is then a child of this one
            return
        (descriptor,) = message.descriptors
        begun, beginning = os.pipe2(os.O_CLOEXEC)
        try:
            keeper = os.fork()
        except OSError:  # no further process is allowed
            traceback.print_exc()
            for each in (descriptor, begun, beginning):
                os.close(each)
            self._tell({"number": number, "code": 1})
            return
        if not keeper:
            self._become(request, descriptor, beginning)
        with suppress(OSError):  # it has done so itself
            os.setpgid(keeper, keeper)
        os.close(descriptor)
        os.close(beginning)
        self._forked[keeper] = number
        process = int(os.read(begun, 2**5) or keeper)
        os.close(begun)
        self._tell({"number": number, "process": process})

    def _become(self, request: Mapping[str, Any], descriptor: int, beginning: int) -> None:
        """Be the keeper, or the process that was asked for, and end.

        Args:
            beginning: where the keeper writes the number of the process.
        """
        code = 1
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for own in (self._woken, self._waker):
                os.close(own)
            self._pipe.close()
            adopt_orphans()
            if process := os.fork():
                with suppress(OSError):  # it has done so itself
                    os.setpgid(process, process)
                os.close(descriptor)
                os.write(beginning, str(process).encode())
                os.close(beginning)
                _keep(process)
            os.setpgid(0, 0)
            os.close(beginning)
            os.environ.update(request["environment"], **{VARIABLE: request["mark"]})
            if request["log"]:
                write_to(request["log"])
            _draw_anew()
            sys.path[:] = request["path"]
            os.chdir(request["folder"])
            end = Pipe(socket.socket(fileno=descriptor), takes_descriptors=True)
            os.register_at_fork(after_in_child=end.close)  # a child would keep the connection open
            function_of(request["target"])(end, request)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        """Take leave of the processes that have ended, and end what they have started."""
        with suppress(BlockingIOError):
            os.read(self._woken, 2**10)
        while self._forked:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            end_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            if (number := self._forked.pop(ended.si_pid, None)) is None:
                continue  # an orphan
            _end_children({*self._forked})  # a keeper that was killed has left its own
            self._tell({"number": number, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, what: Mapping[str, Any]) -> None:
        self._pipe.send(msgspec.msgpack.encode(what))


def _keep(first: int) -> None:
    """Reap what this process has started and adopted until its first process ends. Then kill the rest, and
    end as the first did."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) is not None and ended.si_pid != first:
        os.waitpid(ended.si_pid, 0)
    end_group(first)  # before its number is free
    _, status = os.waitpid(first, 0)
    _end_children(set())
    if os.WIFSIGNALED(status):
        how = os.WTERMSIG(status)
        if how != signal.SIGKILL:
            signal.signal(how, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the first may have written its memory to a file
        os.kill(os.getpid(), how)
    os._exit(os.waitstatus_to_exitcode(status))


def _end_children(spared: set[int]) -> None:
    """Kill all processes below this one, except some of its children and what is below these."""
    while children := {each.number for each in processes() if each.parent == os.getpid()} - spared:
        spared = spared | children  # one that may not be killed is left
        for child in children:
            end_group(child)
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def adopt_orphans() -> None:
    """Let this process be the parent of processes below it that lose their own parent."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _draw_anew() -> None:
    """Give the global random number generators states that no other forked process has. (Python does so with
    its own.)"""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
