"""Examples of the OpenAPI document: one small job, told the same way on every route."""

from __future__ import annotations

from typing import Any

from syncline.contract.diagnosis import Diagnostics, Tail
from syncline.contract.drawn import Lost, PromptAccount, Tally, told
from syncline.contract.events import LedgerSample, Phase, Wait
from syncline.contract.job import JobSpec, ModelSpec
from syncline.contract.recipes import RECIPES
from syncline.contract.token_path import SamplingConvention, Segment, Timing, VersionSpan
from syncline.contract.version_path import VersionId, VersionRecord, WorkerPath
from syncline.gateway.diagnosed import Decomposition, DiagnosticsPage
from syncline.gateway.shapes import (
    Accepted,
    Health,
    HopView,
    JobBrief,
    JobPage,
    JobView,
    LedgerView,
    Named,
    PhasePage,
    RewardView,
    SamplePage,
    TokenPath,
    TokenView,
    TrajectoryBrief,
    TrajectoryPage,
    TrajectoryView,
    VersionPage,
    VersionView,
    WaitList,
)

_AT = 1_788_000_000.0
_JOB = "j0123456789"
_TID = f"{_JOB}-12-3"
_SPEC = JobSpec(name="quickstart", model=ModelSpec(name="tiny", weights="random"))

SPEC: dict[str, Any] = {
    "name": "quickstart",
    "model": {"name": "tiny"},
    "batch": {"groups": 8, "group_size": 8},
}
SPEC_TOML = 'name = "quickstart"\n\n[model]\nname = "tiny"\n\n[batch]\ngroups = 8\ngroup_size = 8\n'

_BRIEF: dict[str, Any] = {
    "id": _JOB,
    "name": "quickstart",
    "state": "running",
    "reason": "",
    "mode": "colocated",
    "phase": "train",
    "update": 12,
    "updates": 50,
    "reward": 0.41,
    "created": _AT,
    "started": _AT + 1,
    "ended": None,
}
WAITS = WaitList(
    items=(
        Wait(name="batch", owner="trainer", since=_AT + 9, deadline=_AT + 609, detail="3 of 8 groups ready"),
    )
)
JOB = JobView(
    **_BRIEF, spec_hash=_SPEC.hash(), spec=_SPEC.model_dump(mode="json"), waits=WAITS.items, recorded=True
)
JOB_PAGE = JobPage(items=[JobBrief(**_BRIEF)], next=None)
PROMPTS = PromptAccount(
    sources=(told(Tally(name="sums", drawn=20, trained=16, filtered={"all 1": 3}, scored=19, reward=9.5)),),
    lost=(Lost("sums", 17, 2, "failed: its prompt has more tokens than the model takes"),),
)
LEDGER = LedgerView(
    submitted=128, running=30, buffered=20, trained=70, filtered=4, failed=1, expired=3, holds=True, dead=0
)
SAMPLES = SamplePage(
    items=[
        LedgerSample(
            submitted=128,
            running=30,
            buffered=20,
            trained=70,
            filtered=4,
            failed=1,
            expired=3,
            holds=True,
            at=_AT,
        )
    ],
    next=None,
)
PHASES = PhasePage(
    items=[
        Phase(
            seq=7,
            mode="colocated",
            phase="train",
            rollout="asleep",
            trainer="awake",
            gate="shut",
            update=12,
            at=_AT,
        )
    ],
    next=None,
)
METRICS: dict[str, Any] = {
    "items": [
        {
            "update": 12,
            "epoch": 0,
            "mode": "colocated",
            "reward": 0.41,
            "lag_max": 1,
            "lag_counts": {"0": 40, "1": 24},
            "loss": 0.02,
            "gap_mean": 0.0004,
            "seconds": 0.8,
            "skipped": False,
            "at": _AT,
        }
    ],
    "next": "1788000000000-0",
}
DIAGNOSTICS = DiagnosticsPage(
    items=[
        Diagnostics(
            update=12,
            version=VersionId(0, 11),
            contract=_SPEC.contract_digest(),
            trajectories=4,
            tokens=32,
            terms={
                "mismatch": Tail(count=32, mean=4e-4, median=2e-4, p99=2e-3, max=2e-3, signed=-1e-5),
                "staleness": Tail(count=32, mean=0.03, median=0.01, p99=0.2, max=0.2, signed=0.01),
            },
            unmeasured={"kv_cache": "the contract's KV cache is wide: there is nothing to compare"},
            by_lag={"staleness": {"0": 2e-7, "1": 0.05}},
            baseline=3.5e-4,
            at=_AT,
        )
    ],
    next=None,
)
WORKERS: dict[str, Any] = {
    "items": [
        {
            "worker": "w0",
            "state": "serving",
            "version": "0.12",
            "digest": "9f" * 32,
            "staged": None,
            "running": 16,
            "waiting": 0,
            "tokens_per_second": 812.0,
            "at": _AT,
        }
    ],
    "processes": [{"service": "rollout", "name": "w0", "pid": 4711, "ready": True, "why": "", "at": _AT}],
}
EVENT_STREAM = (
    "id: 1788000000000-0_1788000000000-1_0-0_0-0\n"
    "event: event\n"
    'data: {"type":"minted","version":"0.12"}\n\n'
    "id: 1788000000000-0_1788000000000-1_0-0_0-0\n"
    "event: end\n"
    f'data: {{"job":"{_JOB}","state":"succeeded"}}\n\n'
)


def accepted(verb: str) -> Accepted:
    """The answer to a request that the scheduler will act on."""
    return Accepted(job=_JOB, verb=verb, state="running")


_DIGEST = "9f" * 32
_RECORD = VersionRecord(
    version=VersionId(0, 12),
    parent=VersionId(0, 11),
    optimizer_step=12,
    contract=_SPEC.contract_digest(),
    state="active",
    digest=_DIGEST,
    representation="bf16",
    nbytes=40_960,
    new_bytes=40_960,
    minted=_AT,
    converted=_AT + 0.1,
    published=_AT + 0.2,
    active=_AT + 0.5,
    workers={"w0": WorkerPath(staged=_AT + 0.3, verified=_AT + 0.4, active=_AT + 0.5, verdict="verified")},
)
VERSIONS = VersionPage(items=[_RECORD], next=None, latest=VersionId(0, 12))
_MINTED = HopView(
    hop="version.minted",
    source="span",
    at=_AT,
    seconds=0.05,
    service="trainer",
    instance="trainer",
    attributes={"version": "0.12", "parent": "0.11", "optimizer_step": 12, "trajectories": 64},
)
VERSION = VersionView(record=_RECORD, path=[_MINTED])

_SPAN = VersionSpan(start=0, end=14, version=VersionId(0, 12), digest=_DIGEST, worker="w0")
_REWARD = RewardView(state="scored", value=1.0, reason="", judge="characters/1", seconds=0.01)
_SAMPLED = HopView(
    hop="token.sampled",
    source="span",
    at=_AT + 1,
    seconds=0.2,
    service="rollout",
    instance="w0",
    attributes={"trajectory": _TID, "attempt": 1, "worker": "w0", "version": "0.12", "start": 0, "end": 14},
)
TRAJECTORY_PAGE = TrajectoryPage(
    items=[
        TrajectoryBrief(trajectory=_TID, group=12, index=3, state="trained", attempt=1, update=13, reason="")
    ],
    next=f"{_TID}",
)
TRAJECTORY = TrajectoryView(
    job=_JOB,
    trajectory=_TID,
    group=12,
    index=3,
    prompt=12,
    attempt=1,
    state="trained",
    update=13,
    lag=0,
    reason="",
    text="ab",
    finish="stop",
    tokens=[1, 5, 6],
    segments=(Segment(kind="prompt", start=0, end=1), Segment(kind="sampled", start=1, end=3)),
    logprobs=[-0.5, -0.25],
    trainer_logprobs=[-0.5, -0.25],
    loss_mask=[1, 1],
    spans=(_SPAN,),
    convention=SamplingConvention(),
    contract=_SPEC.contract_digest(),
    expert_shape=None,
    reward=_REWARD,
    advantage=0.7,
    timing=Timing(started=_AT + 1, queued=0.01, prefill=0.02, decode=0.18),
    traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    hops=[_SAMPLED],
)
TOKEN = TokenPath(
    job=_JOB,
    trajectory=_TID,
    group=12,
    index=3,
    attempt=1,
    prompt=12,
    token=TokenView(index=1, position=2, id=6, text="b", piece="b"),
    span=_SPAN,
    behaviour_logprob=-0.25,
    trainer_logprob=-0.25,
    gap=0.0,
    decomposition=Decomposition(
        worker="w0", rollout_logprob=-0.25, total=0.0, mismatch=0.0, staleness=0.0, kv_cache=None
    ),
    convention=SamplingConvention(),
    loss_mask=1,
    routes=None,
    state="trained",
    update=13,
    lag=0,
    reward=_REWARD,
    advantage=0.7,
    hops=[_SAMPLED],
    missing=[],
    version=VERSION,
)
HEALTH = Health(ready=True, why="")
UNREADY = Health(ready=False, why="Redis at redis://127.0.0.1:6379/0 unreachable for 5 s")
MODELS = Named(items=["tiny", "tiny-moe"])
RECIPES_EXAMPLE = {name: {"name": name, "rollout": {"wide": "bf16"}} for name in sorted(RECIPES)}
NUMBERS = 'syncline_gateway_requests_total{method="GET",route="/v1/jobs",status="200"} 3.0\n'
