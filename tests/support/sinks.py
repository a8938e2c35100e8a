"""A user's own sink that writes down its rows, and fails in a chosen way at a chosen moment."""

import json
import os
import signal
import subprocess
import sys
import time


class Rows:
    """A sink that appends its rows to a file and may fail.

    Args:
        file: the file's path in the run directory.
        fails: raises, exits, dies, is killed, hangs, or hangs deaf (it ignores signals); "" does not fail.
        at: open, close, or the step of a row.
    """

    def __init__(self, file="rows.jsonl", fails="", at=""):
        self.file = file
        self.fails = fails
        self.at = str(at)

    def open(self, run):
        self.out = (run.folder / self.file).open("a")
        self.write(id=run.id, config=run.config)
        self.come("open")
        return run.id or f"run-{os.getpid()}"

    def row(self, row):
        self.write(step=row.step, values=row.values, samples=list(row.samples), seconds=row.seconds)
        self.come(str(row.step))

    def close(self):
        self.come("close")
        self.write(closed=True)

    def write(self, **record):
        print(json.dumps(record), file=self.out, flush=True)

    def come(self, moment):
        if moment != self.at:
            return
        if self.fails == "raises":
            raise ValueError(f"no more of this, {os.environ.get('MY_KEY', 'says nobody')}")
        if self.fails == "exits":
            sys.exit("enough")
        if self.fails == "dies":
            os._exit(3)
        if self.fails == "is killed":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fails == "hangs deaf":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        if self.fails.startswith("hangs"):
            time.sleep(600)
