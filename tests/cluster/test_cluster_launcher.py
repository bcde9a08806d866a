"""The launcher against a real API server, real controllers and a real scheduler; pods run something light."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kubernetes import config
from rig import Rig
from waiting import wait_until

from syncline.scheduler.launch.kubernetes import leader as leading
from syncline.scheduler.launch.kubernetes import manifests
from syncline.scheduler.launch.kubernetes.api import Api, Gone
from syncline.scheduler.launch.kubernetes.launcher import KubernetesLauncher
from syncline.scheduler.launch.kubernetes.leader import Leader
from syncline.scheduler.launch.kubernetes.mirror import Mirror
from syncline.scheduler.launch.kubernetes.plan import Raw, read
from syncline.scheduler.launch.kubernetes.seen import plays
from syncline.scheduler.launch.kubernetes.template import template
from syncline.scheduler.launch.launcher import Placement, Process, ProcessView

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

JOB = "j0123456789"
WORK = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
address = os.environ["SYNCLINE_HEALTH_HOST"], int(os.environ["SYNCLINE_HEALTH_PORT"])
http.server.ThreadingHTTPServer(address, H).serve_forever()
"""
Make = Callable[..., KubernetesLauncher]


def process(name: str, role: str, devices: str = "") -> Process:
    env = {"SYNCLINE_JOB": JOB} | ({"SYNCLINE_WORKER": name} if role == "rollout" else {})
    argv = ("python", "-c", WORK)
    return Process(
        name=f"{JOB}/{name}", argv=argv, env=env, log=Path("/x"), role=role, devices=devices, start=60.0
    )


def placement(workers: int = 2, colocated: bool = False) -> Placement:
    devices = "shared" if colocated else ""
    fleet = [process(f"w{i}", "rollout", devices) for i in range(workers)]
    return Placement(processes=(*fleet, process("trainer", "trainer", devices), process("sync", "sync")))


@pytest.fixture
def make(rig: Rig) -> Iterator[Make]:
    """Makes launchers with the scheduler's own rights; whatever their threads die of fails the test."""
    rig.rights()
    account = rig.plane.account(rig.namespace, "f-scheduler")
    path = account.kubeconfig(rig.folder / "scheduler.yaml", rig.namespace)
    account.close()
    made: list[KubernetesLauncher] = []
    deaths: list[BaseException] = []

    def spawn(name: str, target: Callable[[], None]) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as error:
                deaths.append(error)
                raise

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread

    def launcher(**changes: Any) -> KubernetesLauncher:
        plan = read(json.dumps(rig.launcher_file(**changes)))
        client = config.new_client_from_config(config_file=str(path))  # type: ignore[no-untyped-call]
        made.append(KubernetesLauncher(plan, spawn, f"test{len(made)}", threading.Event(), client))
        return made[-1]

    yield launcher
    for one in made:
        one.close()
    assert deaths == []


def settle(launcher: KubernetesLauncher, wanted: Placement, seconds: float = 90.0) -> dict[str, ProcessView]:
    """Apply until exactly the wanted processes run; their views."""
    names = {one.name for one in wanted.processes}

    def settled() -> bool:
        launcher.apply(wanted)
        seen = launcher.observe()
        return seen.running() == names == set(seen.processes)

    wait_until(settled, seconds, "settled", every=0.1)
    return launcher.observe().processes


def versions(rig: Rig) -> dict[str, str]:
    """Generation of each workload, and resource version of what has none of its own."""
    found = {}
    for path in (
        rig.at("statefulsets", "apps"),
        rig.at("deployments", "apps"),
        rig.at("services"),
        rig.at("configmaps"),
    ):
        for body in rig.rest.items(path, labelSelector=f"syncline.dev/job={JOB}"):
            metadata = body["metadata"]
            found[f"{path} {metadata['name']}"] = str(
                metadata.get("generation") or metadata["resourceVersion"]
            )
    return found


def test_applying_again_changes_nothing_and_what_others_change_is_set_right(rig: Rig, make: Make) -> None:
    launcher = make()
    first = settle(launcher, placement())
    assert {view.starts for view in first.values()} == {1}
    launcher.apply(placement())  # the counts of starts go into the owner once
    known = versions(rig)
    for _ in range(5):
        launcher.apply(placement())
    assert versions(rig) == known
    scale = rig.at("statefulsets", "apps", f"{JOB}-rollout")
    rig.rest.patch(scale, {"spec": {"replicas": 0}})
    rig.rest.send("DELETE", rig.at("services", name=JOB))
    wait_until(
        lambda: len(rig.pods(f"syncline.dev/pool={JOB}-rollout")) == 0, 60, "somebody scaled to nothing"
    )
    again = settle(launcher, placement())
    assert {name: view.starts for name, view in again.items() if "/w" in name} == {
        f"{JOB}/w0": 2,
        f"{JOB}/w1": 2,
    }
    assert rig.rest.get(rig.at("services", name=JOB))["spec"]["clusterIP"] == "None"


def test_pods_get_stable_names_devices_and_the_jobs_account(rig: Rig, make: Make) -> None:
    launcher = make()
    settle(launcher, placement(workers=3))
    by_name = {pod["metadata"]["name"]: pod for pod in rig.pods(f"syncline.dev/job={JOB}")}
    assert {f"{JOB}-rollout-{i}" for i in range(3)} | {f"{JOB}-trainer-0"} < set(by_name)
    spec = by_name[f"{JOB}-trainer-0"]["spec"]
    assert (spec["hostname"], spec["subdomain"]) == (f"{JOB}-trainer-0", JOB)
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert spec["serviceAccountName"] == "f-job"
    assert spec["automountServiceAccountToken"] is False
    assert rig.kubelet.run_of(f"{JOB}-rollout-2").environment(spec["containers"][0])["SYNCLINE_JOB"] == JOB
    settle(launcher, placement(workers=1))  # the pool shrinks from its end
    left = {pod["metadata"]["name"] for pod in rig.pods(f"syncline.dev/pool={JOB}-rollout")}
    assert left == {f"{JOB}-rollout-0"}
    assert launcher.observe().processes[f"{JOB}/w0"].starts == 1


def test_engines_move_between_pools_and_no_process_is_ever_in_two_pods(rig: Rig, make: Make) -> None:
    """Looked at on the server itself, many times, while both switches happen."""
    launcher, over = make(), threading.Event()
    twice: list[tuple[str, list[str]]] = []

    def watch() -> None:
        while not over.wait(0.05):
            where: dict[str, list[str]] = {}
            for pod in rig.pods(f"syncline.dev/job={JOB}"):
                for name in plays(pod):
                    where.setdefault(name, []).append(pod["metadata"]["name"])
            twice.extend((name, pods) for name, pods in where.items() if len(pods) > 1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    for colocated, pools in (
        (True, ["shared", "sync"]),
        (False, ["rollout", "sync", "trainer"]),
        (True, ["shared", "sync"]),
    ):
        wanted = placement(colocated=colocated)

        def moved(wanted: Placement = wanted, pools: list[str] = pools) -> bool:
            launcher.apply(wanted)
            return rig.pools(JOB) == pools

        wait_until(moved, 60, f"pools {pools}", every=0.1)
        views = settle(launcher, wanted)
    over.set()
    watcher.join()
    assert twice == []
    assert {name: view.starts for name, view in views.items()} == {
        f"{JOB}/w0": 3,
        f"{JOB}/w1": 3,
        f"{JOB}/trainer": 3,
        f"{JOB}/sync": 1,
    }


def test_deaths_are_counted_beyond_the_life_of_a_launcher(rig: Rig, make: Make) -> None:
    first = make()
    settle(first, placement())
    rig.run(f"{JOB}-rollout-0").kill()

    def dead() -> ProcessView | None:
        first.apply(placement())
        view = first.observe().processes[f"{JOB}/w0"]
        return view if view.exit is not None else None

    assert wait_until(dead, 30, "the death is seen").exit == -9
    assert settle(first, placement())[f"{JOB}/w0"].starts == 2
    first.apply(placement())
    first.close()
    second = make()
    assert settle(second, placement())[f"{JOB}/w0"].starts == 2
    rig.run(f"{JOB}-rollout-0").kill()
    wait_until(lambda: settle(second, placement())[f"{JOB}/w0"].starts == 3, 60, "the third start is counted")


def test_one_process_of_a_shared_pod_dies_alone(rig: Rig, make: Make) -> None:
    launcher = make()
    settle(launcher, placement(colocated=True))
    state = next((rig.folder / "pods").glob(f"{JOB}-shared-0-*/volumes/cache/pod-8081/processes.json"))
    pids = {name: one["pid"] for name, one in json.loads(state.read_text())["processes"].items()}
    os.kill(pids[f"{JOB}/trainer"], signal.SIGKILL)

    def again() -> bool:
        views = settle(launcher, placement(colocated=True))
        return views[f"{JOB}/trainer"].starts == 2

    wait_until(again, 60, "the trainer was started again")
    assert launcher.observe().processes[f"{JOB}/w0"].starts == 1
    (pod,) = rig.pods(f"syncline.dev/pool={JOB}-shared")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_of_two_launchers_one_leads_and_a_frozen_one_writes_no_more(rig: Rig) -> None:
    rig.rights()
    first, second = (
        Leader(Api(rig.namespace, client(rig)), "f-scheduler", holder, 10.0) for holder in ("a", "b")
    )
    assert (first.turn(), first.leads) == (True, True)
    assert (second.turn(), second.leads) == (False, False)
    wait_until(
        second.turn, 30, "the second leads, once the first has not renewed for its duration", every=0.2
    )
    assert (second.leads, first.leads) == (True, False)
    assert not first.turn()  # and it learns of it
    with pytest.raises(leading.LeadershipLost):
        first.renew_until(threading.Event())
    second.release()
    assert first.turn()


def client(rig: Rig) -> Any:
    account = rig.plane.account(rig.namespace, "f-scheduler")
    path = account.kubeconfig(rig.folder / "leader.yaml", rig.namespace)
    account.close()
    return config.new_client_from_config(config_file=str(path))  # type: ignore[no-untyped-call]


class Forgetful(Api):
    """Its first list says a version that the server has long forgotten."""

    lists = 0

    def list(self, kind: str, selector: str) -> tuple[list[Raw], str]:
        found, version = super().list(kind, selector)
        self.lists += 1
        return found, "1" if self.lists == 1 else version


def test_a_watch_that_is_too_old_is_listed_again(rig: Rig) -> None:
    rig.rights()
    api = Forgetful(rig.namespace, client(rig))
    rig.plane.restart_server()
    with pytest.raises(Gone):
        list(api.watch("ConfigMap", "a=b", "1", 5))
    spawn = partial(threading.Thread, daemon=True)

    def start(name: str, target: Callable[[], None]) -> threading.Thread:
        thread = spawn(target=target, name=name)
        thread.start()
        return thread

    mirror = Mirror(api, ("ConfigMap",), "a=b", start, seconds=2)
    assert mirror.await_synced(30)
    body = {"metadata": {"name": "seen", "labels": {"a": "b"}}, "data": {"x": "1"}}
    rig.rest.make(rig.at("configmaps"), body)
    wait_until(lambda: "seen" in mirror.objects("ConfigMap"), 30, "what came after the relist is seen")
    assert mirror.relists["ConfigMap"] == 2
    wait_until(
        lambda: api.lists == 2, 5, "no more lists than that"
    )  # watches end every 2 s and go on from where they were
    rig.rest.send("DELETE", rig.at("configmaps", name="seen"))
    wait_until(lambda: "seen" not in mirror.objects("ConfigMap"), 30, "its end is seen")
    assert mirror.relists["ConfigMap"] == 2
    mirror.close()


def test_a_job_ends_with_its_owner_though_no_launcher_is_there(rig: Rig, make: Make) -> None:
    launcher = make()
    settle(launcher, placement())
    launcher.close()
    rig.rest.send("DELETE", rig.at("configmaps", name=JOB), query={"propagationPolicy": "Background"})
    wait_until(lambda: not rig.owned(JOB), 120, "the garbage collector took all of it", every=0.3)


def test_a_job_ends_with_its_release(rig: Rig, make: Make) -> None:
    """What `helm uninstall` takes away is the ConfigMap; the scheduler has gone before."""
    rig.rest.make(rig.at("configmaps"), {"metadata": {"name": "f-launcher"}})
    launcher = make(owner="f-launcher")
    settle(launcher, placement())
    launcher.apply(placement())  # the counts of starts are kept, and so is what the job belongs to
    launcher.close()
    rig.rest.send(
        "DELETE", rig.at("configmaps", name="f-launcher"), query={"propagationPolicy": "Background"}
    )
    wait_until(lambda: not rig.owned(JOB), 120, "the garbage collector took all of it", every=0.3)


def test_what_a_dead_scheduler_left_is_removed(rig: Rig, make: Make) -> None:
    first = make()
    settle(first, placement())
    first.close()
    second = make()
    second.stop_all()
    assert rig.owned(JOB) == []
    assert second.observe().processes == {}


def test_a_job_keeps_the_plan_that_it_began_with(rig: Rig, make: Make) -> None:
    first = make()
    settle(first, placement())
    before = {pod["metadata"]["uid"] for pod in rig.pods(f"syncline.dev/job={JOB}")}
    first.close()
    images = {role: f"registry.test/{role}:2" for role in ("rollout", "trainer", "sync", "colocated")}
    second = make(images=images)
    settle(second, placement())
    for _ in range(5):
        second.apply(placement())
    assert {pod["metadata"]["uid"] for pod in rig.pods(f"syncline.dev/job={JOB}")} == before
    second.stop_all()
    settle(second, placement())  # another job's beginning
    (trainer,) = rig.pods(f"syncline.dev/pool={JOB}-trainer")
    assert trainer["spec"]["containers"][0]["image"] == "registry.test/trainer:2"


def test_a_later_form_of_pods_waits_until_they_are_made_anew(
    rig: Rig, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler of another release writes the same pods in another form, and leaves the running ones alone."""
    first, ours = make(), template
    settle(first, placement())
    before, known = uids(rig), versions(rig)
    first.close()

    def later(*given: Any) -> Raw:
        made = ours(*given)
        made["metadata"]["annotations"] |= {"form": "later", "syncline.dev/look": "later"}
        return made

    monkeypatch.setattr(manifests, "template", later)
    second = make()
    settle(second, placement())
    for _ in range(5):
        second.apply(placement())
    assert uids(rig) == before
    assert {name: at for name, at in versions(rig).items() if "configmaps" not in name} == {
        name: at for name, at in known.items() if "configmaps" not in name
    }
    rig.run(f"{JOB}-rollout-0").kill()
    wait_until(lambda: settle(second, placement())[f"{JOB}/w0"].starts == 2, 60, "the worker is back")
    same = {pod["metadata"]["uid"] for pod in rig.pods(f"syncline.dev/pool={JOB}-rollout")}
    settle(second, placement(workers=3))
    grown = rig.pods(f"syncline.dev/pool={JOB}-rollout")
    assert same < {pod["metadata"]["uid"] for pod in grown}  # a pool that grows restarts nothing
    assert [pod["metadata"]["annotations"].get("form") for pod in grown] == [None] * 3
    kept = placement(workers=3).processes
    changed = [msgspec.structs.replace(one, start=90.0) if one.role == "trainer" else one for one in kept]
    wanted = Placement(processes=tuple(changed))

    def anew() -> bool:
        settle(second, wanted)
        (pod,) = rig.pods(f"syncline.dev/pool={JOB}-trainer")
        return bool(pod["metadata"]["annotations"].get("form") == "later")

    wait_until(anew, 60, "the trainer's own pod has changed, and so it is made in the later form")
    rollout = rig.pods(f"syncline.dev/pool={JOB}-rollout")
    assert [pod["metadata"]["annotations"].get("form") for pod in rollout] == [None] * 3


def uids(rig: Rig) -> set[str]:
    return {pod["metadata"]["uid"] for pod in rig.pods(f"syncline.dev/job={JOB}")}


def test_a_launcher_outlives_its_api_server(rig: Rig, make: Make) -> None:
    launcher = make()
    settle(launcher, placement())
    rig.plane.restart_server()
    rig.run(f"{JOB}-rollout-1").kill()
    wait_until(lambda: settle(launcher, placement())[f"{JOB}/w1"].starts == 2, 60, "the death is seen")
    settle(launcher, placement(workers=3))


def test_a_manifest_that_the_server_refuses_is_the_jobs_failure(rig: Rig, make: Make) -> None:
    launcher = make(roles={"trainer": {"pod": {"spec": {"restartPolicy": "Sometimes"}}}})
    with pytest.raises(ValueError, match="restartPolicy"):
        launcher.apply(placement())


@pytest.mark.parametrize("key", ["claimTemplate", "queue"])
def test_a_cluster_without_the_kinds_that_a_plan_asks_for_is_refused(make: Make, key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key} 'x': this cluster does not serve"):
        make(**{key: "x"})
