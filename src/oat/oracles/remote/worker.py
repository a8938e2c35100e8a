"""The worker processes of a reward server, which have its model. Mosec starts one worker for each device,
gathers requests into batches, and hands the batches to the workers.

The module runs as a program, with Mosec's own arguments and with `WorkerSettings` in the environment. It
serves until a signal ends it, or until its standard input closes because the parent process has ended.
"""

import hmac
import os
import signal
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from mosec import Server
from mosec import Worker as MosecWorker

from oat.errors import OatError, shortened
from oat.oracles.remote.format import (
    ANSWERED,
    FAILED,
    REFUSED,
    ROUTE,
    FeedbackRequest,
    decode_request,
    encode_reply,
)
from oat.types import Message

if TYPE_CHECKING:
    from oat.models.scoring import Encoded

SETTINGS, DEVICE = "OAT_SERVE", "OAT_SERVE_DEVICE"
"""The environment variables for `WorkerSettings`, as JSON, and for the device of each process."""

_Encoded = tuple[FeedbackRequest, list["Encoded"]]


class WorkerSettings(msgspec.Struct, frozen=True):
    """The settings of all workers.

    Attributes:
        devices: the device of each process.
        secret: the bytes with which the body of every request must begin; otherwise the request is refused.
        max_batch_size: largest number of requests that are scored together.
        max_wait_ms: milliseconds that the first request of a batch waits for others.
    """

    model: str
    devices: tuple[str, ...]
    secret: bytes
    dtype: str
    label: int | None
    batch_tokens: int
    max_tokens: int | None
    max_batch_size: int
    max_wait_ms: int


class RewardWorker(MosecWorker):
    """The worker, which scores requests. If a request cannot be scored, its reply says why; the other
    requests of its batch are scored."""

    def __init__(self) -> None:
        import torch  # here, because the process that starts the workers needs no model

        from oat.hardware.memory import keep_few_kernels
        from oat.models.scoring import Scorer

        super().__init__()
        keep_few_kernels()
        settings = msgspec.json.decode(os.environ[SETTINGS], type=WorkerSettings)
        self.secret = settings.secret
        if os.environ[DEVICE] == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // len(settings.devices)))
        self.scorer = Scorer(
            settings.model,
            dtype=settings.dtype,
            device=os.environ[DEVICE],
            label=settings.label,
            batch_tokens=settings.batch_tokens,
            max_tokens=settings.max_tokens,
        )
        self.scorer.score([self.scorer.encode((Message("user", "1"),), "1")])  # loads the weights

    def deserialize(self, data: bytes) -> bytes:
        return data

    def serialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: list[bytes] | bytes) -> list[bytes] | bytes:
        """Return the replies to a list of bodies. If Mosec makes no batches, return the reply to one body."""
        return self._replies(data) if isinstance(data, list) else self._replies([data])[0]

    def _replies(self, bodies: Sequence[bytes]) -> list[bytes]:
        read = [self._read(body) for body in bodies]
        scored = iter(self._scored([each for each in read if not isinstance(each, bytes)]))
        return [each if isinstance(each, bytes) else next(scored) for each in read]

    def _read(self, body: bytes) -> _Encoded | bytes:
        """Return the request in a body, with its encoded rows. If the request cannot be scored, return the
        reply that refuses it."""
        if not hmac.compare_digest(body[: len(self.secret)], self.secret):
            return REFUSED + b"ask the server, not its workers"
        try:
            request = decode_request(body[len(self.secret) :])
            return request, [self.scorer.encode(messages, response) for messages, response in request.items]
        except OatError as error:
            return REFUSED + str(error).encode()

    def _scored(self, requests: Sequence[_Encoded]) -> list[bytes]:
        try:
            scores = iter(self.scorer.score([row for _, rows in requests for row in rows]))
            return [
                ANSWERED + encode_reply(request, [next(scores) for _ in rows]) for request, rows in requests
            ]
        except Exception as error:
            if len(requests) > 1:
                return [reply for each in requests for reply in self._scored([each])]
            traceback.print_exc()
            return [
                FAILED
                + (str(error) if isinstance(error, OatError) else shortened(type(error).__name__)).encode()
            ]


def main() -> None:
    settings = msgspec.json.decode(os.environ[SETTINGS], type=WorkerSettings)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    server = Server()
    server.append_worker(
        RewardWorker,
        num=len(settings.devices),
        max_batch_size=settings.max_batch_size,
        max_wait_time=settings.max_wait_ms,
        env=[{DEVICE: device} for device in settings.devices],
        route=ROUTE,
    )
    server.run()


def _end_with_parent() -> None:
    while os.read(0, 1):  # not `sys.stdin`: the interpreter takes its lock at exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
