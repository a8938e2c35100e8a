"""An oracle in another process whose answers come late, in another order, and once never.

As a program (`python late_oracle.py OCCURRENCE`) it is the server:

- It prints its port, takes one JSON request per connection, and ends when its standard input ends.
- It never answers the question about that occurrence.
- Every third submission waits for five more submissions, or for PATIENCE_S.

As a module it holds the client: an oracle as a user would write it.
"""

import json
import random
import socket
import socketserver
import sys
import threading
import time

BEHIND, PATIENCE_S = 5, 0.3


class LateOracle:
    answers = "compare"
    durable = False

    def __init__(self, port: int):
        self.port = port

    def submit(self, questions):
        return call(
            self.port, {"submit": [[str(question.key), *question.candidates] for question in questions]}
        )

    def collect(self, tickets, seconds):
        from oat.types import Answer, Key

        answered = []
        for ticket, key, probability in call(self.port, {"collect": list(tickets), "seconds": seconds}):
            purpose, *numbers = key.split("/")
            answer = Answer(
                Key(purpose, *map(int, numbers)), (probability,), ("ok",), queries=1, by="late", seconds=0.0
            )
            answered.append((ticket, answer))
        return answered


class DurableLateOracle(LateOracle):
    durable = True


def call(port, request):
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        connection.makefile("rw") as lines,
    ):
        lines.write(json.dumps(request) + "\n")
        lines.flush()
        return json.loads(lines.readline())


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, lost):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lost = lost
        self.asked = []
        self.changed = threading.Condition()
        self.order = random.Random(0)

    def submit(self, questions):
        with self.changed:
            tickets = [str(len(self.asked) + number) for number in range(len(questions))]
            self.asked += [
                (key, 0.8 if first > second else 0.3, time.monotonic()) for key, first, second in questions
            ]
            self.changed.notify_all()
        return tickets

    def collect(self, tickets, seconds):
        until = time.monotonic() + seconds
        with self.changed:
            while (
                not (ready := [ticket for ticket in tickets if self.is_ready(int(ticket))])
                and time.monotonic() < until
            ):
                self.changed.wait(min(0.05, max(0.0, until - time.monotonic())))
        self.order.shuffle(ready)
        return [[ticket, *self.asked[int(ticket)][:2]] for ticket in ready]

    def is_ready(self, number):
        key, _, since = self.asked[number]
        is_late = (
            number % 3 == 0 and len(self.asked) <= number + BEHIND and time.monotonic() < since + PATIENCE_S
        )
        return key.split("/")[3] != self.lost and not is_late

    def submissions(self):
        return [key for key, _, _ in self.asked]


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        request = json.loads(self.rfile.readline())
        if "submit" in request:
            reply = self.server.submit(request["submit"])
        elif "collect" in request:
            reply = self.server.collect(request["collect"], request["seconds"])
        else:
            reply = self.server.submissions()
        self.wfile.write(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    server = Server(sys.argv[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
