"""A made-up job's evidence, consistent with itself, from which tests cut away or bend one thing."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from syncline.contract.diagnosis import Diagnostics, Tail
from syncline.contract.events import LedgerSample, Phase, UpdateMetrics
from syncline.contract.version_path import VersionId, VersionRecord, WorkerPath
from syncline.gateway.evidence import Evidence, LedgerLine, SampleText, SegmentFacts

BEGAN = 1_000_000.0
GROUPS, SIZE = 4, 2


def metrics(update: int, *, epoch: int = 0, reward: float | None = 0.5, lag: int = 0) -> UpdateMetrics:
    return UpdateMetrics(
        update=update,
        epoch=epoch,
        mode="colocated",
        groups=GROUPS,
        trajectories=GROUPS * SIZE,
        tokens=80,
        reward=reward,
        unscored=0,
        lag_max=lag,
        lag_mean=float(lag),
        lag_counts={str(lag): GROUPS * SIZE},
        loss=0.1,
        grad_norm=1.0,
        entropy=1.0,
        ratio_mean=1.0,
        clip_fraction=0.0,
        gap_mean=0.002,
        gap_max=0.01,
        same_version_gap=0.001 if lag == 0 else None,
        kl=None,
        response_mean=10.0,
        masked_tokens=0,
        expired=0,
        waited=0.5,
        seconds=0.2,
        non_finite=0,
        skipped=False,
        at=BEGAN + 10 + update,
    )


def phase(
    seq: int,
    mode: Literal["colocated", "disjoint"],
    name: Literal["sample", "train", "sync", "flow", "done"],
    update: int,
) -> Phase:
    return Phase(
        seq=seq,
        mode=mode,
        phase=name,
        rollout="asleep" if name == "train" else "awake",
        trainer="awake" if name in ("train", "flow") else "asleep",
        gate="open" if name in ("sample", "flow") else "shut",
        update=update,
        at=BEGAN + 8 + update + seq * 0.01,
    )


def sample(at: float, trained: int, running: int = 3, buffered: int = 1) -> LedgerSample:
    return LedgerSample(
        submitted=trained + running + buffered,
        running=running,
        buffered=buffered,
        trained=trained,
        filtered=0,
        failed=0,
        expired=0,
        holds=True,
        at=at,
    )


def version(number: int) -> VersionRecord:
    minted = BEGAN + 9.5 + number
    return VersionRecord(
        version=VersionId(0, number),
        parent=VersionId(0, number - 1) if number else None,
        optimizer_step=number,
        contract="c" * 64,
        state="active",
        digest=f"{number:064x}",
        minted=minted,
        published=minted + 0.2,
        active=minted + 0.4,
        workers={name: WorkerPath(active=minted + 0.4 + i * 0.1) for i, name in enumerate(("w0", "w1"))},
    )


def tail(mean: float, count: int = 30) -> Tail:
    return Tail(count=count, mean=mean, median=mean / 2, p99=4 * mean, max=5 * mean, signed=0.0)


def diagnosis(update: int, **changes: object) -> Diagnostics:
    """Of an update whose probed tokens were all of lag 1."""
    whole = Diagnostics(
        update=update,
        version=VersionId(0, update - 1),
        contract="c" * 64,
        trajectories=4,
        tokens=30,
        terms={"total": tail(0.02), "mismatch": tail(1e-3), "staleness": tail(0.02)},
        unmeasured={
            "kv_cache": "the contract's KV cache is wide: there is nothing to compare",
            "noise_staleness": "no probed token was sampled under the version itself",
            "noise_decode": "no probed token was sampled under the version itself",
            "routes": "the model does not route",
        },
        kl={"k1": 1e-4, "k2": 1e-6, "k3": 1e-6},
        clip_fraction=0.01,
        effective_sample_size=0.98,
        exact=0.5,
        baseline=1e-3 if update > 5 else None,
        at=BEGAN + 10 + update,
    )
    return msgspec.structs.replace(whole, **changes)


def evidence(updates: int = 20, seed: int = 0) -> Evidence:
    """A job that succeeded: rewards rise from 0.1 to 0.9, a disjoint stretch in the middle third."""
    rng = random.Random(seed)
    third = updates // 3
    each = GROUPS * SIZE
    ids = [
        [f"jtest-{(u - 1) * GROUPS + k // SIZE}-{k % SIZE}" for k in range(each)]
        for u in range(1, updates + 1)
    ]
    lengths = [[rng.randint(4, 16) for _ in row] for row in ids]
    phases = [phase(1, "colocated", "sample", 0)]
    for u in range(1, updates + 1):
        if third <= u < 2 * third:
            phases.append(phase(3 * u, "disjoint", "flow", u))
        else:
            names: tuple[Literal["train", "sync", "sample"], ...] = ("train", "sync", "sample")
            phases += [phase(3 * u + i, "colocated", name, u) for i, name in enumerate(names)]
    phases.append(phase(3 * updates + 3, "colocated", "done", updates))
    total = each * updates
    return Evidence(
        job="jtest",
        name="made-up",
        spec_hash="ab" * 32,
        state="succeeded",
        reason="",
        created=BEGAN,
        started=BEGAN + 1,
        ended=BEGAN + 11 + updates,
        max_lag=1,
        lag_policy="wait",
        metrics=tuple(
            metrics(u, reward=0.1 + 0.8 * (u - 1) / max(1, updates - 1), lag=int(third <= u < 2 * third))
            for u in range(1, updates + 1)
        ),
        samples=tuple(sample(BEGAN + 9 + s, min(total, each * s)) for s in range(updates)),
        phases=tuple(phases),
        versions=tuple(version(n) for n in range(updates + 1)),
        counts={"submitted": total + 2, "running": 0, "buffered": 0, "trained": total, "expired": 2},
        ledger=(
            *(
                LedgerLine(trajectory, "trained", "", tokens)
                for row, sizes in zip(ids, lengths, strict=True)
                for trajectory, tokens in zip(row, sizes, strict=True)
            ),
            LedgerLine("jtest-900-0", "expired", "job ended", None),
            LedgerLine("jtest-900-1", "expired", "job ended", None),
        ),
        segments=tuple(
            SegmentFacts(update=u, trajectories=tuple(ids[u - 1]), tokens=tuple(lengths[u - 1]))
            for u in range(1, updates + 1)
        ),
        diagnostics=tuple(diagnosis(u) for u in range(1, updates + 1)),
        texts=(SampleText(update=1, trajectory=ids[0][0], prompt="copy: abc", text="abd <b>", reward=0.5),),
    )
