"""GPUs that a run reserves from a real Ray cluster, which has none and is told that it has some. So these
tests show who gets which number, and nothing computes on a GPU."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures import World, oat
from pretended import pretended_gpu

from oat.errors import ActorError, ConfigError
from oat.processes.gpus import own_index
from oat.processes.ray_cluster import Cluster, RayLauncher, RayRemote
from oat.resolve.placement import placement
from oat.runtime.calls import call_of, value_of
from oat.runtime.worker import WORKER

VISIBLE = f"{Path(__file__).parents[1] / 'support' / 'gpu_numbers.py'}:VisibleGpu"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"CPU": 4, "GPU": 5}))
        patched.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        started = Cluster(None, tmp_path_factory.mktemp("logs"), 60.0, WORKER)
        yield started
        started.close()


def visible(remote: RayRemote) -> str:
    """Return what a worker sees."""
    value_of(remote.call("make", call_of("make", VISIBLE, b""))(), remote.name)
    found: str = value_of(remote.call("visible", call_of("visible"))(), remote.name)
    return found


def started(launcher: RayLauncher, actors: int) -> list[RayRemote]:
    return [launcher.start(f"actor {number}") for number in range(actors)]


def test_a_cluster_with_too_few_gpus(cluster: Cluster) -> None:
    placed = placement(6, collocate=False)
    with pytest.raises(
        ConfigError, match=r"compute\.gpus is 6, and the cluster has 5 GPUs; lower compute.gpus"
    ):
        cluster.reserve(6, placed.actors, placed.learner, 1.0, 0.0)


@pytest.mark.sample("False", seconds=15)
@pytest.mark.parametrize("collocate", [False, True])
def test_each_actor_has_a_gpu_of_its_own(cluster: Cluster, tmp_path: Path, collocate: bool) -> None:
    """No two actors see the same GPU, and an actor sees that of the learner only if they share it. An actor
    that takes the place of a lost one sees the GPU of the lost one. Others' GPUs are not free."""
    placed = placement(4 if collocate else 3, collocate=collocate)
    gpus = cluster.reserve(len(placed.actors), placed.actors, placed.learner, 0.5, 0.0)
    try:
        own = gpus.hold()
        launcher = cluster.launcher(0.5, gpus.actors)
        remotes = started(launcher, len(placed.actors))
        seen = [visible(remote) for remote in remotes]
        assert len({*seen}) == len(seen)
        assert (str(own) in seen) == collocate
        with pytest.raises(ActorError, match="no further process can be started"):
            launcher.start("actor 9")
        remotes[1].close()
        assert visible(launcher.start("actor 10")) == seen[1]
        with pytest.raises(ConfigError, match=r"of the 5 GPUs of the cluster \d are free; wait until others"):
            cluster.reserve(3, (0, 1, 2), 2, 0.5, 0.0)
    finally:
        gpus.close()


@pytest.mark.slow
@pytest.mark.parametrize("collocate", [False, True])
def test_a_learner_in_a_process_of_the_cluster_has_its_gpu(cluster: Cluster, collocate: bool) -> None:
    """The GPU of the learner comes with the CPUs that its process takes. It sees the GPU of an actor only if
    they share it."""
    placed = placement(2, collocate=collocate)
    gpus = cluster.reserve(2, placed.actors, placed.learner, 0.5, 1.0)
    try:
        actors = started(cluster.launcher(0.5, gpus.actors), len(placed.actors))
        learner = cluster.launcher(1.0, gpus.learner).start("learner 0")
        assert (visible(learner) in [visible(actor) for actor in actors]) == collocate
    finally:
        gpus.close()


@pytest.mark.slow
def test_actors_that_others_leave_no_cpus_for(cluster: Cluster, tmp_path: Path) -> None:
    cluster.refuse_too_many([1.0] * 4, "4 actors at 1")
    others = started(cluster.launcher(1.0), 3)
    for other in others:
        value_of(other.call("make", call_of("make", VISIBLE, b""))(), other.name)
    with pytest.raises(ConfigError, match="of the 4 CPUs of the cluster 1 are free; wait until"):
        cluster.refuse_too_many([1.0] * 4, "4 actors at 1")
    for other in others:
        other.close()
    cluster.refuse_too_many([1.0] * 4, "4 actors at 1")
    with pytest.raises(ConfigError, match="5 actors at 1 need 5 logical CPUs, and the cluster has 4 CPUs"):
        cluster.refuse_too_many([1.0] * 5, "5 actors at 1")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_an_actor_without_a_device_ends_the_start(
    cluster: Cluster,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ray promises a GPU, and the actor finds none. The run is refused by the name of the actor, and its GPUs
    are free again."""
    monkeypatch.setattr("oat.assemble.apart.Cluster", lambda address, logs, deadline_s: cluster)
    monkeypatch.setattr(cluster, "close", lambda: None)
    changes = {"compute.runtime": "ray", "compute.profile": "gpu", "compute.gpus": 5}
    with pretended_gpu():
        assert oat("train", world.config("grpo", tmp_path, changes)) == 2
    assert "actor 0: compute.profile is 'gpu', and torch finds no CUDA device" in capsys.readouterr().err
    cluster.reserve(5, range(5), 0, 0.5, 0.0).close()


@pytest.mark.parametrize(
    ("given", "seen", "index"),
    [("2", None, 2), ("6", "4,5,6,7", 2), ("GPU-b", "GPU-a, GPU-b", 1), ("0", "0", 0)],
)
def test_the_index_of_a_gpu(
    given: str, seen: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(seen, monkeypatch)
    assert own_index(given) == index


@pytest.mark.parametrize(("given", "seen"), [("2", "4,5"), ("GPU-b", None), ("", None), ("0", "")])
def test_a_gpu_that_this_process_does_not_see(
    given: str, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(seen, monkeypatch)
    with pytest.raises(ConfigError, match="start the cluster and the run with the same CUDA_VISIBLE_DEVICES"):
        own_index(given)


def see(devices: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if devices is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
