"""From placements to Kubernetes objects, without a cluster: properties of all of them, and their schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.scheduler.launch.kubernetes import manifests
from syncline.scheduler.launch.kubernetes.manifests import APPLIED, Pool, objects, owner, pools, reference
from syncline.scheduler.launch.kubernetes.plan import PodPlan, read
from syncline.scheduler.launch.kubernetes.seen import plays
from syncline.scheduler.launch.kubernetes.template import LOOK, PROCESSES, merge, template
from syncline.scheduler.launch.launcher import Placement, Process

SECRET = "redis://:hunter2@redis:6379/0"
PLAN: dict[str, Any] = {
    "release": "demo",
    "namespace": "rl",
    "lease": "demo-syncline-scheduler",
    "serviceAccount": "demo-syncline-job",
    "images": {"rollout": "r:1", "trainer": "t:1", "sync": "s:1", "colocated": "c:1"},
    "secretEnv": {"SYNCLINE_REDIS_URL": {"secret": "demo-redis", "key": "url"}},
    "runs": {"claim": "runs"},
    "models": {"claim": "models", "subPath": "hf"},
}
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def plan(**changes: Any) -> PodPlan:
    return read(json.dumps(PLAN | changes))


def process(job: str, name: str, role: str, devices: str = "", start: float = 180.0) -> Process:
    env = {
        "SYNCLINE_JOB": job,
        "SYNCLINE_REDIS_URL": SECRET,
        "SYNCLINE_PORT": "0",
        "SYNCLINE_TOKEN": "hunter3",
    }
    if role == "rollout":
        env["SYNCLINE_WORKER"] = name
    argv = ("python", "-m", f"syncline.{role}")
    return Process(
        name=f"{job}/{name}", argv=argv, env=env, log=Path("/x"), role=role, devices=devices, start=start
    )


def placement(workers: int, colocated: bool, trainer: bool = True, job: str = "j0123456789") -> Placement:
    devices = "shared" if colocated else ""
    fleet = [process(job, f"w{i}", "rollout", devices) for i in range(workers)]
    trainers = [process(job, "trainer", "trainer", devices)] if trainer else []
    return Placement(processes=(*fleet, *trainers, process(job, "sync", "sync")))


def all_objects(found: tuple[Pool, ...], made_by: PodPlan) -> list[dict[str, Any]]:
    return [owner("j0123456789", made_by, "{}"), *objects(found, made_by, "u-1")]


def pods_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods that a workload's controller would make."""
    spec = body["spec"]
    metadata = spec["template"]["metadata"]
    count = spec.get("replicas", spec.get("parallelism"))
    return [{"metadata": {**metadata, "name": f"{body['metadata']['name']}-{i}"}} for i in range(count)]


plans = st.builds(
    plan,
    queue=st.sampled_from(["", "team-a"]),
    claimTemplate=st.sampled_from(["", "devices"]),
    priorityClass=st.sampled_from(["", "high"]),
    grace=st.integers(10, 600),
)


@settings(max_examples=60, deadline=None)
@given(workers=st.integers(1, 40), colocated=st.booleans(), trainer=st.booleans(), made_by=plans)
def test_every_process_is_played_once_by_objects_with_lawful_names(
    workers: int, colocated: bool, trainer: bool, made_by: PodPlan
) -> None:
    wanted = placement(workers, colocated, trainer)
    found = pools(wanted, made_by)
    bodies = all_objects(found, made_by)
    played = [
        name
        for body in bodies
        if "template" in body.get("spec", {})
        for pod in pods_of(body)
        for name in plays(pod)
    ]
    assert sorted(played) == sorted(p.name for p in wanted.processes)
    assert sorted(name for pool in found for name in pool.plays()) == sorted(played)
    for body in bodies:
        metadata = body["metadata"]
        assert NAME.fullmatch(metadata["name"])
        assert len(metadata["name"]) <= 63 - len(
            "-0123456789"
        )  # controllers add a hash or an ordinal in labels
        assert all(len(value) <= 63 for value in metadata["labels"].values())
        assert metadata["labels"]["syncline.dev/job"] == "j0123456789"
        assert body["kind"] == "ConfigMap" or metadata["ownerReferences"][0]["uid"] == "u-1"
    assert "hunter" not in json.dumps(bodies)


@settings(max_examples=30, deadline=None)
@given(before=st.integers(1, 20), after=st.integers(1, 20))
def test_a_pool_of_another_size_keeps_its_pods(before: int, after: int) -> None:
    """Nothing but the number of replicas changes, so that no pod that stays is made anew."""
    first, second = (
        {body["metadata"]["name"]: body for body in all_objects(pools(placement(n, False), plan()), plan())}
        for n in (before, after)
    )
    assert first.keys() == second.keys()
    for name, body in first.items():
        spec, other = dict(body.get("spec", {})), dict(second[name].get("spec", {}))
        if name.endswith("-rollout"):
            assert (spec.pop("replicas"), other.pop("replicas")) == (before, after)
        assert spec == other, name


def test_a_gang_keeps_its_size() -> None:
    assert manifests.fixed(plan()) == ""
    assert "'team-a'" in manifests.fixed(plan(queue="team-a"))


@pytest.mark.parametrize("version", ["1.30", "1.34", "1.37"])
@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"queue": "team-a"}, {"claimTemplate": "devices"}], ids=["plain", "kueue", "dra"]
)
def test_objects_fit_the_schemas(version: str, colocated: bool, changes: dict[str, Any]) -> None:
    """Strict, so that a misspelt field is found. DRA's claims are part of pods since 1.31."""
    role = {
        "gpus": 4,
        "resources": {"requests": {"cpu": 8, "memory": "64Gi"}, "limits": {"memory": "64Gi"}},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "topologySpread": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "pod": {
            "spec": {"containers": [{"name": "rollout", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}]}
        },
    }
    quiet = {**role, "pod": {}}
    roles = {"rollout": role, "trainer": quiet, "colocated": quiet}
    made_by = plan(roles=roles, priorityClass="high", pullSecrets=["regcred"], **changes)
    for body in all_objects(pools(placement(3, colocated), made_by), made_by):
        if "claimTemplate" in changes and version == "1.30" and colocated:
            continue
        kubernetes_validate.validate(body, version, strict=True)


def test_scaling_a_pool_changes_no_template() -> None:
    made_by = plan()
    small, large = (pools(placement(n, colocated=False), made_by) for n in (2, 3))
    looks = [
        {
            b["metadata"]["name"]: b["spec"]["template"]["metadata"]["annotations"][LOOK]
            for b in objects(found, made_by, "u")[1:]
        }
        for found in (small, large)
    ]
    assert looks[0] == looks[1]
    assert [pool.pods for pool in small] != [pool.pods for pool in large]


def asked(wanted: Placement, made_by: PodPlan, kept: str | None = None, uid: str = "u") -> dict[str, str]:
    """Workload -> the digest by which a scheduler knows that it is as it should be."""
    bodies = objects(pools(wanted, made_by), made_by, uid, kept)[1:]
    return {body["metadata"]["name"]: body["metadata"]["annotations"][APPLIED] for body in bodies}


def test_another_form_of_the_same_pod_asks_for_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later release writes pods in another form, and knows a key of the plan more: what runs is left alone."""
    made_by, wanted, ours = plan(), placement(2, colocated=False), template
    before = asked(wanted, made_by)

    def later(*given: Any) -> dict[str, Any]:
        made: dict[str, Any] = ours(*given)
        made["spec"]["hostNetwork"] = False
        return made

    monkeypatch.setattr(manifests, "template", later)
    assert asked(wanted, made_by) == before
    kept = json.dumps(
        json.loads(made_by.text()) | {"cache": {"sizeLimit": "50Gi"}}
    )  # of another release's hand
    assert asked(wanted, read(kept), made_by.text()) == before
    assert owner("j1", read(kept), "{}", kept=made_by.text())["data"]["launcher.yaml"] == made_by.text()


def test_what_a_pod_is_made_of_asks_for_a_new_one() -> None:
    made_by, wanted = plan(), placement(2, colocated=False)
    before = asked(wanted, made_by)
    assert asked(wanted, made_by) == before
    assert asked(placement(3, colocated=False), made_by) == before  # a pod more changes none of the others
    gang, larger = (asked(placement(n, colocated=False), plan(queue="q")) for n in (2, 3))
    assert {name for name in gang if gang[name] != larger[name]} == {"j0123456789-rollout"}
    assert not before.items() & asked(wanted, plan(grace=90)).items()
    assert not before.items() & asked(wanted, made_by, uid="another").items()
    for changed in (
        {"argv": ("python", "-m", "other")},
        {"start": 900.0},
        {"env": {"SYNCLINE_JOB": "j0123456789", "MORE": "1"}},
    ):
        processes = [
            msgspec.structs.replace(one, **changed) if one.role == "sync" else one for one in wanted.processes
        ]
        after = asked(Placement(processes=tuple(processes)), made_by)
        differ = {name for name in before if before[name] != after[name]}
        assert differ == (
            set() if "env" in changed else {"j0123456789-sync"}
        )  # a pod takes over no such variable


def test_colocated_engines_share_one_container_under_an_entry() -> None:
    made_by = plan(roles={"colocated": {"gpus": 8}}, grace=60)
    body = next(
        b
        for b in all_objects(pools(placement(2, colocated=True), made_by), made_by)
        if "shared" in b["metadata"]["name"]
    )
    spec = body["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["shareProcessNamespace"] is True  # else nobody collects orphans of engines
    assert container["image"] == "c:1"
    assert container["command"][:4] == ["python", "-m", "syncline.scheduler.launch.pod", "55"]
    told = json.loads(container["command"][4])
    assert [one["name"] for one in told] == ["j0123456789/w0", "j0123456789/w1", "j0123456789/trainer"]
    assert told[0]["env"] == {"SYNCLINE_JOB": "j0123456789", "SYNCLINE_WORKER": "w0"}
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


def test_where_devices_can_be_claimed_each_role_has_a_container_and_both_share_the_claim() -> None:
    made_by = plan(claimTemplate="devices")
    body = next(
        b
        for b in all_objects(pools(placement(2, colocated=True), made_by), made_by)
        if "shared" in b["metadata"]["name"]
    )
    spec = body["spec"]["template"]["spec"]
    assert [c["name"] for c in spec["containers"]] == ["rollout", "trainer"]
    assert [c["image"] for c in spec["containers"]] == ["r:1", "t:1"]
    assert all(c["resources"]["claims"] == [{"name": "devices"}] for c in spec["containers"])
    assert spec["resourceClaims"] == [{"name": "devices", "resourceClaimTemplateName": "devices"}]
    ports = [c["ports"][0]["containerPort"] for c in spec["containers"]]
    assert len(set(ports)) == 2


def test_gangs_begin_suspended_and_only_where_there_is_more_than_one_pod() -> None:
    made_by = plan(queue="team-a")
    bodies = {
        b["metadata"]["name"].rpartition("-")[2]: b
        for b in objects(pools(placement(3, False), made_by), made_by, "u")
    }
    gang = bodies["rollout"]
    assert (gang["kind"], gang["spec"]["suspend"], gang["spec"]["parallelism"]) == ("Job", True, 3)
    assert gang["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert bodies["trainer"]["kind"] == "StatefulSet"


@given(start=st.floats(1, 100_000))
def test_the_startup_budget_is_never_less_than_the_load_time(start: float) -> None:
    one = process("j1", "sync", "sync", start=start)
    made_by = plan()
    body = objects(pools(Placement(processes=(one,)), made_by), made_by, "u")[1]
    probe = body["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= int(start)
    assert probe["httpGet"]["path"] == "/started"


def test_what_runs_to_its_end_is_not_probed() -> None:
    one = msgspec.structs.replace(process("j1", "validation", "validation"), restart="on_failure")
    made_by = plan()
    body = objects(pools(Placement(processes=(one,)), made_by), made_by, "u")[1]
    (container,) = body["spec"]["template"]["spec"]["containers"]
    assert not [key for key in container if key.endswith("Probe")]
    assert container["image"] == "t:1"  # it has a trainer's engine


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(under=json_values, over=json_values)
def test_what_is_laid_over_wins_and_laying_it_again_changes_nothing(under: Any, over: Any) -> None:
    once = merge(under, over)
    assert merge(once, over) == once
    assert merge(over, over) == over


def test_overrides_reach_containers_by_name_and_no_selector() -> None:
    wanted = placement(1, colocated=False)
    role = {
        "pod": {
            "spec": {
                "hostNetwork": True,
                "containers": [{"name": "trainer", "env": [{"name": "A", "value": "1"}]}],
            }
        }
    }
    made_by = plan(roles={"trainer": role})
    body = next(
        b for b in objects(pools(wanted, made_by), made_by, "u") if b["metadata"]["name"].endswith("trainer")
    )
    spec = body["spec"]["template"]["spec"]
    assert spec["hostNetwork"] is True
    assert {"name": "A", "value": "1"} in spec["containers"][0]["env"]
    assert spec["containers"][0]["image"] == "t:1"
    for bad in (
        {"metadata": {"labels": {"syncline.dev/job": "x"}}},
        {"metadata": {"annotations": {PROCESSES: "{}"}}},
    ):
        refused = plan(roles={"trainer": {"pod": bad}})
        found = pools(wanted, refused)
        with pytest.raises(ValueError, match=r"roles\.trainer\.pod"):
            objects(found, refused, "u")


@pytest.mark.parametrize(
    ("change", "story"),
    [
        ({"imagess": {}}, "imagess"),
        ({"secretEnv": {}}, "SYNCLINE_REDIS_URL"),
        ({"env": {"SYNCLINE_REDIS_URL": "x"}}, "in env and in secretEnv"),
        ({"roles": {"rollout": {"gpus": 0.5}}}, "gpus"),
        ({"roles": {"rollout": {"gpus": -1}}}, r"roles\.rollout\.gpus"),
        ({"roles": {"rollout": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}}, r"roles\.rollout\.gpus"),
        ({"roles": {"rollout": {"resources": {"claims": []}}}}, "only requests and limits"),
        ({"grace": 3}, "grace 3"),
        ({"images": {"rollout": "r"}}, "trainer"),
    ],
)
def test_a_bad_file_is_refused_with_its_key(change: dict[str, Any], story: str) -> None:
    with pytest.raises(ValueError, match=story):
        plan(**change)


def test_a_jobs_plan_is_kept_whole() -> None:
    made_by = plan(queue="q", roles={"trainer": {"gpus": 8}})
    assert read(owner("j1", made_by, "{}")["data"]["launcher.yaml"]) == made_by


def test_a_job_belongs_to_its_release_where_that_has_something_to_belong_to() -> None:
    made_by = plan(owner="demo-syncline-launcher")
    above = reference({"metadata": {"name": "demo-syncline-launcher", "uid": "u-0"}})
    assert owner("j1", made_by, "{}", [above])["metadata"]["ownerReferences"] == [above]
    assert "ownerReferences" not in owner("j1", plan(), "{}")["metadata"]
    kubernetes_validate.validate(owner("j1", made_by, "{}", [above]), "1.34", strict=True)


@pytest.mark.parametrize("job", ["J1", "j_1", "j1" * 20, "1j"])
def test_what_is_no_servers_id_becomes_no_name(job: str) -> None:
    with pytest.raises(ValueError, match="job id"):
        pools(Placement(processes=(process(job, "sync", "sync"),)), plan())


def test_processes_that_differ_are_no_pool() -> None:
    first, second = (process("j1", f"w{i}", "rollout") for i in range(2))
    other = msgspec.structs.replace(second, argv=("python", "-m", "other"))
    with pytest.raises(ValueError, match="j1/w1"):
        pools(Placement(processes=(first, other)), plan())
