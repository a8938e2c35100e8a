"""R30: a Ray cluster that a run starts listens on the loopback interface only, and answers only those who
have its token."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from apart_runs import ON_RAY, pair
from fixtures import Finished
from ray_runs import RayStrikes, part

from oat.processes import ray_cluster as cluster
from oat.processes.ray_cluster import Cluster
from oat.runtime.calls import call_of, value_of
from oat.runtime.worker import WORKER, surroundings, versions

pytestmark = [pytest.mark.fault("R30"), pytest.mark.large]

LOOPBACK = {
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",
}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as the kernel lists them."""
ENTER = """
import ray, sys
ray.init(address=sys.argv[1], logging_level=50, log_to_driver=False)
print("inside with", ray.cluster_resources()["CPU"])
"""


@pytest.fixture
def own(tmp_path: Path, strikes: RayStrikes) -> Iterator[Cluster]:
    """A cluster with an actor."""
    made = Cluster(None, tmp_path, 60.0, WORKER)
    actor = made.launcher(0.5).start("actor 0")
    value_of(actor.call("prepare", call_of("prepare", versions(), [], *surroundings()))(), "actor 0")
    yield made
    made.close()


def listening(processes: list[int]) -> list[tuple[int, str]]:
    """Return the processes and addresses of all sockets of these processes that listen."""
    owners: dict[str, int] = {}
    for process in processes:
        for file in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):
                owners[os.readlink(file)] = process
    found = []
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and (owner := owners.get(f"socket:[{rest[5]}]")):
                found.append((owner, local.split(":")[0]))
    return found


@pytest.mark.usefixtures("own")
def test_it_listens_on_the_loopback_interface_only(
    strikes: RayStrikes, figure: Callable[[str], None]
) -> None:
    found = listening(strikes.left())
    outside = [place for place in found if place[1] not in LOOPBACK]
    figure(f"{len(outside)} of {len(found)} listening sockets of a cluster are on another interface")
    assert len(found) >= 3
    assert outside == []


@pytest.mark.usefixtures("own")
def test_nobody_else_can_enter_its_folder(strikes: RayStrikes, figure: Callable[[str], None]) -> None:
    """Sockets and logs are in it, and Ray lets everybody write beside them."""
    (folder,) = strikes.temporary.iterdir()
    assert list(folder.rglob("sockets/*"))
    others = folder.stat().st_mode & 0o077
    figure(f"{int(bool(others))} of 1 folders of a cluster can be entered by other users")
    assert others == 0


def entered(address: str, home: Path, token: str | None) -> subprocess.CompletedProcess[str]:
    """Try to enter a cluster from another process, which looks for it on the loopback interface."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    kept |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    given = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    return subprocess.run(
        [sys.executable, "-c", ENTER, address],
        env={**kept, **given, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("how", ["without a token", "with a wrong token", "with the token"])
def test_only_those_with_the_token_are_let_in(
    how: str, tmp_path: Path, strikes: RayStrikes, figure: Callable[[str], None]
) -> None:
    words = Path(f"/proc/{part(strikes, 'raylet')}/cmdline").read_text().split("\0")
    (address,) = (word.partition("=")[2] for word in words if word.startswith("--gcs-address="))
    token = {"without a token": None, "with a wrong token": "0" * 64, "with the token": cluster._TOKEN}[how]
    entry = entered(address, tmp_path, token)
    is_inside = "inside with" in entry.stdout
    assert is_inside == (how == "with the token"), entry.stdout + entry.stderr
    figure(f"{int(is_inside)} of 1 processes {how} let in")


def test_the_token_is_in_no_file(
    finished: Finished,
    tmp_path: Path,
    strikes: RayStrikes,
    capfd: pytest.CaptureFixture[str],
    figure: Callable[[str], None],
) -> None:
    token, seen = cluster._TOKEN.encode(), list[int]()

    def files(folder: Path) -> list[bytes]:
        return [file.read_bytes() for file in folder.rglob("*") if file.is_file()]

    def look() -> None:
        found = files(strikes.temporary)
        assert len(found) > 5
        seen.append(sum(token in content for content in found))

    run = pair(finished, "grpo", tmp_path, {}, ON_RAY)
    strikes.doing["sample", 6] = look
    assert run.train() == 0
    found = files(tmp_path)
    said = capfd.readouterr()
    has_it = sum(token in content for content in found) + sum(seen)
    figure(f"{has_it} of {len(found)} files of a run and its logs contain the token")
    assert seen == [0]
    assert has_it == 0
    assert cluster._TOKEN not in said.out + said.err
