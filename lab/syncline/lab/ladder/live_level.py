"""Level 6: live update. A known change of the weights must move the engine's scores as it moves the trainer's.

On engines of the ladder's own: weights that serve a job are never perturbed. A digest proves that bytes arrived; these
scores prove that the forward pass reads them, all of them, and nothing of the version before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from syncline.contract.events import WorkItem
from syncline.contract.token_path import trajectory_id
from syncline.contract.version_path import VersionId
from syncline.lab.activation import FAR, FLOOR, NEAR, prove
from syncline.lab.ladder.apart import gap
from syncline.lab.ladder.records import Check, absent, same
from syncline.lab.ladder.state_level import order_of
from syncline.lab.ladder.subject import PROMPTS, ROOM, Subject, learn
from syncline.lab.measure import Scores
from syncline.lab.pair import DRAIN, JOB, Pair
from syncline.rollout.engine import Chunk, CommitPolicy, RolloutEngine

STRENGTH = 0.5
"""Of the perturbation, relative to each tensor's mean magnitude: far over a low-bit format's step."""
READ = 0.1
"""Of the change that the trainer predicts: an engine that moves by less has not read what was installed."""
BEFORE = 4
"""Decode steps before the version changes under running requests."""


def checks(subject: Subject) -> Iterator[Check]:
    """The perturbation, the manifest, warm against cold, and requests that ran through a commit."""
    pair = subject.pair
    folder = subject.new_folder("perturbed")
    proof = prove(pair, subject.records, folder, strength=STRENGTH, scores=lambda: _scores(subject))
    scale = max(proof.gap, FLOOR)
    yield Check(
        name="the perturbation is large enough to see",
        found=FAR * scale,
        bound=proof.predicted,
        source=f"{FAR:g} times the same-version gap, beside the trainer's own change",
        unit="nats, mean",
    )
    yield Check(
        name="the installed version changes the scores",
        found=READ * proof.predicted,
        bound=proof.found,
        source="a tenth of the trainer's own change, beside the engine's",
        unit="nats, mean",
    )
    yield Check(
        name="scores move as the trainer says",
        found=proof.apart,
        bound=NEAR * scale,
        source=f"{NEAR:g} times the same-version gap",
        unit="nats, mean",
        where="" if proof.apart <= NEAR * scale else f"moved by {proof.found:.3g}, not {proof.predicted:.3g}",
    )
    yield same("the old weights score as before", [] if proof.restored else ["scores"], "to the last bit")
    yield same("the active version is the manifest's", _active(subject), "signed manifest")
    yield same("warm equals cold", _cold(subject), "a new engine of the same manifest, to the last bit")
    yield from _in_flight(subject)


def _scores(subject: Subject) -> tuple[Scores, Scores]:
    """One record at a time, under a wide context: nothing that level 5 is for."""
    return subject.trainer_alone(as_rollout=True), [score.logprobs for score in subject.prefill("wide")]


def _active(subject: Subject) -> list[str]:
    manifest, rollout = subject.manifest, subject.pair.rollout
    wrong = []
    if rollout.serving != (manifest.version, manifest.digest()):
        wrong.append(f"{rollout.serving} serves, {manifest.version} was published")
    return wrong + subject.rollouts.unlike(rollout, manifest, subject.store)


def _cold(subject: Subject) -> list[str]:
    """Records whose scores differ between the engine that took each version in turn and one that took this alone."""
    warm = [score.logprobs for score in subject.prefill(subject.contract.rollout.kv_cache)]
    fresh = engine_of(subject)
    cold = [
        fresh.score(
            record.tokens,
            record.segments[0].end,
            buffer="active",
            temperature=subject.spec.sampling.temperature,
        ).logprobs
        for record in subject.records
    ]
    pairs = zip(subject.records, warm, cold, strict=True)
    return [record.trajectory for record, a, b in pairs if tuple(a) != tuple(b)]


def engine_of(subject: Subject) -> RolloutEngine:
    """A new engine that serves the pair's version."""
    pair = subject.pair
    fresh = subject.rollouts.cold(pair.spec, pair.models)
    assert pair.version is not None
    fresh.stage(pair.store.read_manifest(pair.version), pair.store)
    fresh.commit(DRAIN)
    return fresh


# ---- requests that run through a commit -------------------------------------------------------------------------
def _in_flight(subject: Subject) -> Iterator[Check]:
    """Tokens before and after a commit in mid-flight, each against a cold engine of the version its chunk names."""
    pair, policy = subject.pair, CommitPolicy(kind="in_place", kv="recomputed")
    through = "requests that run through a commit"
    if pair.contract.in_flight == "drain":
        yield absent(through, "in_flight is drain: a trajectory is of one version")
        return
    if subject.rollouts.running:
        yield absent(through, subject.rollouts.running)
        return
    old = engine_of(subject)
    items = _items()
    for item in items:
        pair.rollout.submit(pair.prompter.request(item, attempt=1))
    chunks = [chunk for _ in range(BEFORE) for chunk in pair.rollout.step()]
    learn(pair, subject.records)
    pair.publish(policy)
    while pair.rollout.running:
        chunks += pair.rollout.step()
    new = engine_of(subject)
    found: list[array[float]] = []
    wanted: list[tuple[float, ...]] = []
    names, versions, mislabelled = [], set[VersionId](), list[str]()
    for item in items:
        own = [chunk for chunk in chunks if chunk.trajectory == item.trajectory]
        tokens = (*pair.prompter.request(item, attempt=1).prompt, *(t for chunk in own for t in chunk.tokens))
        for chunk in own:
            if chunk.tokens:
                engine = new if chunk.version == pair.version else old
                wanted.append(_score(engine, subject, tokens, own, chunk))
                found.append(array("f", chunk.logprobs))
                names.append(f"{chunk.trajectory} from token {chunk.start} on, version {chunk.version},")
                versions.add(chunk.version)
                if chunk.adapter != adapter_of(pair, chunk.version):
                    mislabelled.append(f"{names[-1]} adapter {chunk.adapter}")
    bound, source = order_of(subject)
    yield gap("each span is of the version that it names", found, wanted, names, bound=bound, source=source)
    yield same("each span names its version's adapter", mislabelled, "immutable names, one per version")
    missing = {old.serving[0] if old.serving else None, pair.version} - versions
    yield same(
        "the commit met running requests", [f"no token of {v}" for v in missing], "both versions sampled"
    )


def adapter_of(pair: Pair, version: VersionId) -> str | None:
    """The name under which a version's adapter is served; None: the contract has none."""
    return None if pair.contract.adapter is None else f"{pair.contract.name}@{version}"


def _items() -> list[WorkItem]:
    return [
        WorkItem(
            job=JOB,
            trajectory=trajectory_id(JOB, group, 0),
            group=group,
            index=0,
            prompt=group,
            traceparent="",
            submitted_at=0.0,
        )
        for group in range(2 * PROMPTS, 2 * PROMPTS + ROOM)
    ]


def _score(
    engine: RolloutEngine, subject: Subject, tokens: Sequence[int], own: Sequence[Chunk], chunk: Chunk
) -> tuple[float, ...]:
    """What `engine` says of the chunk's tokens, everything before them given."""
    prompt = len(tokens) - sum(len(each.tokens) for each in own)
    first = prompt + chunk.start
    scored = engine.score(
        tokens[: first + len(chunk.tokens)],
        first,
        buffer="active",
        temperature=subject.spec.sampling.temperature,
    )
    return scored.logprobs
