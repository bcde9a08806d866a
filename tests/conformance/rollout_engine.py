"""What every rollout engine must do. An engine's own test file subclasses `RolloutEngineSuite` and gives
`make`.

`make(folder, job, key, max_running)` makes an engine for the model in `folder`. Where a test says "cold", it
means a plain `transformers` model that shares no code with the engine.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from conformance.forge import (
    FAMILIES,
    FURTHER,
    JOB,
    KEY,
    MODELS,
    Forge,
    cold_logits,
    cold_logprobs,
    cold_replay,
    family_folder,
    gap,
    plain,
)
from msgspec.structs import replace
from transformers import AutoConfig

from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.schemes import KvFormat
from syncline.contract.version_path import BadManifest, SignedManifest, VersionId, loaded_digest, sign
from syncline.rollout.engine import (
    Chunk,
    CommitPolicy,
    OldVersion,
    Request,
    RolloutEngine,
    Sampling,
    StageFailed,
)

MakeEngine = Callable[[Path, str, bytes, int], RolloutEngine]
DRAIN = CommitPolicy(kind="drain")
APART = 1e-2  # versions are at least so far from one another on a whole span


def requests(count: int, seed: int = 0, **sampling: float | int | str) -> list[Request]:
    """Requests with prompts of mixed length and, unless told otherwise, log-normal response lengths."""
    drawn = random.Random(seed)
    given = {"length": "lognormal", "max_tokens": 60, "length_median": 14, "length_sigma": 0.8} | sampling
    return [
        Request(
            trajectory=f"{JOB}-{i}-0",
            prompt=(1, *(drawn.randrange(4, 100) for _ in range(drawn.choice([0, 4, 4, 9, 31])))),
            seed=(seed, i, 0, 1),
            sampling=Sampling(**given),  # type: ignore[arg-type]
            experts=True,
        )
        for i in range(count)
    ]


def run(
    engine: RolloutEngine, wanted: list[Request], joins: random.Random | None = None
) -> dict[str, list[Chunk]]:
    """Sample all; with `joins`, at random moments between decode steps instead of together."""
    chunks: dict[str, list[Chunk]] = {request.trajectory: [] for request in wanted}
    left = list(wanted)
    while left or engine.running:
        for _ in range(joins.randrange(4) if joins else len(left)):
            if left and engine.room:
                engine.submit(left.pop(0))
        for chunk in engine.step():
            chunks[chunk.trajectory].append(chunk)
    return chunks


class RolloutEngineSuite:
    """Subclasses give the fixture `make`.

    contract precision contract of their engine; the versions and the cold models are made by it
    kv       how their engine stores the attention context; cold models store it so too
    noise    FP32: one full pass against prefill and decode
    alone    FP32: one batch against another
    tipped   share of requests in which noise may tip a stored value into its neighbouring code
    tip      largest difference that such a value makes
    heavy    MiB that two versions of the 100 million parameters of the memory test take at least
    """

    contract: PrecisionContract = RECIPES["bf16"]
    kv: KvFormat = "wide"
    noise = 5e-5
    alone = 1e-5
    tipped = 0.0
    tip = 0.0
    heavy = 300

    @property
    def bar(self) -> float:
        """Largest difference of a single comparison, which may be one of the few."""
        return max(self.noise, self.tip)

    def equal_but_for_noise(self, gaps: list[float], noise: float) -> None:
        """One largest difference per request: below `noise`, or the request is one of the few that tipped."""
        beyond = [found for found in gaps if found >= noise]
        assert len(beyond) <= self.tipped * len(gaps), beyond
        assert max(beyond, default=0.0) <= self.tip

    @pytest.fixture
    def forge(self, tmp_path: Path) -> Forge:
        return self.forged(tmp_path, MODELS / "tiny-moe")

    def forged(self, root: Path, folder: Path) -> Forge:
        return Forge(root, folder, contract=self.contract)

    def serve(self, engine: RolloutEngine, forge: Forge, signed: SignedManifest) -> RolloutEngine:
        engine.stage(signed, forge.store)
        assert engine.commit(DRAIN) is not None
        return engine

    @pytest.fixture
    def engine(self, make: MakeEngine, forge: Forge) -> RolloutEngine:
        """An engine of the tiny MoE that serves version 0.0."""
        return self.serve(make(forge.folder, JOB, KEY, 64), forge, forge.version(0))

    # ---- sampling
    @pytest.mark.parametrize("family", [*FAMILIES, *FURTHER])
    def test_each_request_gets_the_result_that_it_gets_alone(
        self, make: MakeEngine, tmp_path: Path, family: str
    ) -> None:
        forge = self.forged(tmp_path, family_folder(family, tmp_path))
        engine = self.serve(make(forge.folder, JOB, KEY, 16), forge, forge.version(0))
        wanted = requests(24)
        alone = {request.trajectory: run(engine, [request])[request.trajectory] for request in wanted}
        together = run(engine, wanted, random.Random(1))
        cold = forge.cold(0)
        apart, wrong = [], []
        for request in wanted:
            (one,), (other,) = alone[request.trajectory], together[request.trajectory]
            assert one.finish == other.finish == "length"
            assert len(one.tokens) == len(other.tokens)
            if engine.describe().seeded:
                assert one.tokens == other.tokens
                apart.append(gap(one.logprobs, other.logprobs))
                assert one.experts == other.experts
            ids = [*request.prompt, *other.tokens]
            scored = cold_logprobs(cold, ids, len(request.prompt), self.kv)
            wrong.append(gap(other.logprobs, scored))
        self.equal_but_for_noise(apart, self.alone)
        self.equal_but_for_noise(wrong, self.noise)
        lengths = {len(chunks[0].tokens) for chunks in together.values()}
        assert len(lengths) > 8, "a batch of equal lengths would show nothing"

    @pytest.mark.parametrize("family", [name for name in FAMILIES if name != "tiny-dense"])
    def test_expert_ids_are_those_of_a_cold_model(
        self, make: MakeEngine, tmp_path: Path, family: str
    ) -> None:
        forge = self.forged(tmp_path, MODELS / family)
        engine = self.serve(make(forge.folder, JOB, KEY, 16), forge, forge.version(0))
        layers_topk = engine.describe().experts
        assert layers_topk is not None
        wanted = requests(8)
        cold = forge.cold(0)
        caught: list[torch.Tensor] = []
        routers = [m for m in cold.modules() if type(m).__name__.lower().endswith("router")]
        hooks = [r.register_forward_hook(lambda m, i, out: caught.append(out[-1])) for r in routers]
        for request, (chunk,) in zip(wanted, run(engine, wanted, random.Random(2)).values(), strict=True):
            assert chunk.experts is not None
            fed = len(request.prompt) + len(chunk.tokens) - 1
            assert chunk.experts.shape == (fed, *layers_topk)
            caught.clear()
            cold_logits(cold, [*request.prompt, *chunk.tokens][:-1], self.kv)
            expected = torch.stack(caught, dim=1).to(torch.uint8)
            assert chunk.experts.data == expected.numpy().tobytes()
        for hook in hooks:
            hook.remove()

    def test_a_group_shares_its_prompt_and_not_its_samples(self, engine: RolloutEngine) -> None:
        base = requests(1)[0]
        group = [replace(base, trajectory=f"{JOB}-0-{i}", seed=(0, 0, i, 1)) for i in range(8)]
        together = run(engine, group)
        assert len({chunks[0].tokens for chunks in together.values()}) == 8
        if not engine.describe().seeded:
            return
        for request in group:
            again = run(engine, [request])[request.trajectory][0]
            assert again.tokens == together[request.trajectory][0].tokens
        other = run(engine, [replace(group[0], seed=(0, 0, 0, 2))])[group[0].trajectory][0]
        assert other.tokens != together[group[0].trajectory][0].tokens

    def test_a_cut_to_one_token_is_the_argmax(self, engine: RolloutEngine, forge: Forge) -> None:
        cold = forge.cold(0)
        for cut in ({"top_k": 1}, {"top_p": 1e-6}):
            mixed = requests(6, **cut) + [replace(r, trajectory=r.trajectory + "x") for r in requests(6)]
            for request in mixed:
                (chunk,) = run(engine, mixed)[request.trajectory] if request is mixed[0] else (None,)
                if chunk is None:
                    continue
                ids = [*request.prompt, *chunk.tokens]
                best = cold_logits(cold, ids, self.kv).argmax(-1)
                assert chunk.tokens == tuple(best[len(request.prompt) - 1 : -1].tolist())

    def test_a_recorded_mask_is_the_cut_and_log_probs_are_over_it(
        self, engine: RolloutEngine, forge: Forge
    ) -> None:
        cold, temperature, most = forge.cold(0), 0.7, 20
        for top_p in (1.0, 0.2):
            cut = requests(
                5, length="stop", temperature=temperature, top_k=most, top_p=top_p, record_mask=True
            )
            whole = [replace(r, trajectory=r.trajectory + "x") for r in requests(2)]
            found = run(engine, [*cut, *whole])
            assert [chunk.mask for r in whole for chunk in found[r.trajectory]] == [None, None]
            sizes = []
            for request in cut:
                (chunk,) = found[request.trajectory]
                assert chunk.mask is not None
                ids, first = [*request.prompt, *chunk.tokens], len(request.prompt)
                rows_TV = cold_logits(cold, ids, self.kv)[first - 1 : -1].float() / temperature
                sizes += list(chunk.mask.sizes)
                for n, support in enumerate(chunk.mask.supports()):
                    rest_V = rows_TV[n].clone()
                    rest_V[list(support)] = -torch.inf
                    assert rows_TV[n][list(support)].min() > rest_V.max() - self.bar
                    left_V = torch.log_softmax(rows_TV[n][list(support)], -1)
                    due = float(left_V[list(support).index(chunk.tokens[n])])
                    assert abs(chunk.logprobs[n] - due) < self.bar
                    if top_p < 1:  # of the whole or of the top-k: the last id is the one that crosses it
                        best_V = torch.softmax(rows_TV[n], -1).sort(descending=True)[0]
                        shares_V, of_k = best_V[: len(support)], float(best_V[:most].sum())
                        assert float(shares_V[:-1].sum()) <= top_p + 1e-4
                        assert float(shares_V.sum()) >= top_p * of_k - 1e-4
            assert max(sizes) <= most
            assert (set(sizes) == {most}) == (top_p == 1)

    def test_stop_tokens_end_a_response_and_not_before_the_least_length(self, engine: RolloutEngine) -> None:
        stop = engine.describe().stop_ids
        free = run(engine, requests(40, length="stop", max_tokens=200))
        ended = [chunks[0] for chunks in free.values() if chunks[0].finish == "stop"]
        assert ended, "200 tokens of a random model must hold a stop token somewhere"
        for chunk in ended:
            assert chunk.tokens[-1] in stop
            assert not set(chunk.tokens[:-1]) & set(stop)
        least = requests(40, length="stop", max_tokens=200, min_tokens=150)
        if not engine.describe().suppresses:
            with pytest.raises(ValueError, match="min_tokens"):
                engine.submit(least[0])
            return
        held = run(engine, least)
        assert all(len(chunks[0].tokens) >= 150 for chunks in held.values())

    def test_an_aborted_request_leaves_no_trace(self, engine: RolloutEngine) -> None:
        wanted = requests(12)
        expected = run(engine, wanted)
        for request in wanted:
            engine.submit(request)
        engine.step()
        gone = max(
            expected, key=lambda name: len(expected[name][0].tokens)
        )  # a server may end short ones meanwhile
        assert engine.abort(gone)
        assert not engine.abort(gone)
        left = [chunk for _ in range(80) for chunk in engine.step()]
        assert {chunk.trajectory for chunk in left} | {gone} >= {
            r.trajectory for r in wanted if len(expected[r.trajectory][0].tokens) > 2
        }
        for chunk in left if engine.describe().seeded else ():
            assert chunk.tokens == expected[chunk.trajectory][0].tokens
        assert gone not in {chunk.trajectory for chunk in left}

    def test_a_request_that_cannot_run_is_refused_by_name(
        self, make: MakeEngine, forge: Forge, engine: RolloutEngine
    ) -> None:
        request = requests(1)[0]
        with pytest.raises(ValueError, match=r"-0-0: the engine holds no verified version"):
            make(forge.folder, JOB, KEY, 4).submit(request)
        with pytest.raises(ValueError, match="exceed the model's 1024 positions"):
            engine.submit(replace(request, sampling=Sampling(max_tokens=1024)))
        for prompt in ((), (1, 100), (1, -1)):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                engine.submit(replace(request, prompt=prompt))
        engine.submit(request)
        with pytest.raises(ValueError, match="runs already"):
            engine.submit(request)
        for other in requests(64)[1:]:
            engine.submit(other)
        assert engine.room == 0
        with pytest.raises(ValueError, match="no room"):
            engine.submit(replace(request, trajectory="more"))

    # ---- versions under running requests
    def swaps(
        self, engine: RolloutEngine, forge: Forge, policy: CommitPolicy, versions: int, wave: int = 8
    ) -> tuple[list[Request], dict[str, list[Chunk]]]:
        """Sample while versions 1, 2, ... come every eight steps; under each, `wave` new requests arrive."""
        wanted = requests(wave * (versions + 1), max_tokens=60, length_median=25)
        chunks: dict[str, list[Chunk]] = {request.trajectory: [] for request in wanted}
        left, steps, pending, done = list(wanted), 0, False, 0
        while left or engine.running or done < versions:
            while left and engine.room and len(wanted) - len(left) < min(steps + 1, wave * (done + 1)):
                engine.submit(left.pop(0))
            if not pending and done < versions and steps % 8 == 7:
                engine.stage(forge.version(done + 1), forge.store)
                pending = True
            if pending and engine.commit(policy) is not None:
                pending, done = False, done + 1
            for chunk in engine.step():
                chunks[chunk.trajectory].append(chunk)
            steps += 1
        return wanted, chunks

    def allow(self, engine: RolloutEngine, policy: CommitPolicy) -> None:
        """Skip what the engine says that it does not offer. An engine with one buffer is told the policy here."""
        described = engine.describe()
        if policy.kind not in described.policies:
            pytest.skip(f"{described.engine} does not offer {policy.kind}")
        if policy.kv == "carried" and not described.carries:
            pytest.skip(f"{described.engine} carries no context")

    @pytest.mark.parametrize("kind", ["drain", "continue_old"])
    def test_begun_requests_end_under_the_version_they_began_under(
        self, engine: RolloutEngine, forge: Forge, kind: str
    ) -> None:
        policy = CommitPolicy(kind="drain" if kind == "drain" else "continue_old")
        self.allow(engine, policy)
        wanted, chunks = self.swaps(engine, forge, policy, versions=3)
        seen = set()
        for request in wanted:
            (chunk,) = chunks[request.trajectory]
            seen.add(chunk.version.number)
            self.judge(forge, request, chunks[request.trajectory])
        assert seen == {0, 1, 2, 3}

    def test_in_place_with_recomputed_context_is_true(self, engine: RolloutEngine, forge: Forge) -> None:
        policy = CommitPolicy(kind="in_place")
        self.allow(engine, policy)
        wanted, chunks = self.swaps(engine, forge, policy, versions=3)
        for request in wanted:
            assert {chunk.context for chunk in chunks[request.trajectory]} == {"recomputed"}
            self.judge(forge, request, chunks[request.trajectory])
        assert max(len(told) for told in chunks.values()) >= 3

    @pytest.mark.parametrize("family", ["tiny-moe", "tiny-hybrid", "tiny-kimi"])
    def test_in_place_with_carried_context_is_true_within_its_age(
        self, make: MakeEngine, tmp_path: Path, family: str
    ) -> None:
        forge = self.forged(tmp_path, MODELS / family)
        engine = self.serve(make(forge.folder, JOB, KEY, 64), forge, forge.version(0))
        policy = CommitPolicy(kind="in_place", kv="carried", carried_age=2)
        self.allow(engine, policy)
        wanted, chunks = self.swaps(engine, forge, policy, versions=4, wave=2)
        ages = set()
        for request in wanted:
            told = chunks[request.trajectory]
            ages |= {(chunk.context, chunk.carried_age) for chunk in told}
            for before, after in pairwise(told):
                aged = before.carried_age + after.version.number - before.version.number
                expected = ("carried", aged) if aged <= 2 else ("recomputed", 0)
                assert (after.context, after.carried_age) == expected
            self.judge(forge, request, told)
        assert ages == {("recomputed", 0), ("carried", 1), ("carried", 2)}

    def judge(self, forge: Forge, request: Request, told: list[Chunk]) -> None:
        """Each span's log-probs are those of the version that it names, and of neither neighbour."""
        ids = [*request.prompt, *(token for chunk in told for token in chunk.tokens)]
        for at, chunk in enumerate(told):
            number = chunk.version.number
            assert chunk.digest == forge.manifest(number).digest()
            assert gap(chunk.logprobs, self.cold_span(forge, request, told, at, ids, number)) < self.bar
            if len(chunk.tokens) < 3:
                continue  # a token or two may agree by chance
            for wrong in (number - 1, number + 1):
                if wrong >= 0:
                    assert gap(chunk.logprobs, self.cold_span(forge, request, told, at, ids, wrong)) > APART

    def cold_span(
        self, forge: Forge, request: Request, told: list[Chunk], at: int, ids: list[int], number: int
    ) -> list[float]:
        """Chunk `at` scored as if version `number` had sampled it, over the context that it had."""
        chunk = told[at]
        first = len(request.prompt) + chunk.start
        end = first + len(chunk.tokens)
        if chunk.context == "recomputed":
            return cold_logprobs(forge.cold(number), ids[:end], first, self.kv)
        root = at
        while told[root].context == "carried":
            root -= 1
        parts = [
            (forge.cold(c.version.number), len(request.prompt) + c.start + len(c.tokens))
            for c in told[root:at]
        ]
        return cold_replay([*parts, (forge.cold(number), end)], ids, self.kv)[-1]

    def test_new_requests_begin_on_the_new_version_while_old_ones_finish(
        self, engine: RolloutEngine, forge: Forge
    ) -> None:
        policy = CommitPolicy(kind="continue_old")
        self.allow(engine, policy)
        old, new, newest = requests(3, min_tokens=40, max_tokens=40)
        engine.submit(old)
        engine.step()
        engine.stage(forge.version(1), forge.store)
        committed = engine.commit(policy)
        assert committed is not None
        assert committed.in_flight == 1
        engine.submit(new)
        engine.step()
        engine.stage(forge.version(2), forge.store)
        assert engine.commit(policy) is None, "two versions have requests: the third waits"
        ended = []
        while engine.commit(policy) is None:
            ended += engine.step()
        assert [chunk.trajectory for chunk in ended] == [old.trajectory]
        engine.submit(newest)
        while engine.running:
            ended += engine.step()
        assert [chunk.version.number for chunk in ended] == [0, 1, 2]

    def needs_two_buffers(self, engine: RolloutEngine) -> None:
        if not engine.describe().double_buffer:
            pytest.skip("staging takes this engine out of rotation")

    def test_draining_begins_nothing(self, engine: RolloutEngine, forge: Forge) -> None:
        self.needs_two_buffers(engine)
        first, second = requests(2, min_tokens=10, max_tokens=10)
        engine.submit(first)
        engine.step()
        engine.stage(forge.version(1), forge.store)
        assert engine.commit(DRAIN) is None
        assert engine.room == 0
        with pytest.raises(ValueError, match="no room"):
            engine.submit(second)
        engine.abort_stage()
        assert engine.room > 0, "a drain given up lets requests begin again"

    # ---- staging
    def served(self, engine: RolloutEngine) -> tuple[VersionId, str]:
        assert engine.serving is not None
        return engine.serving

    def staged(self, engine: RolloutEngine) -> VersionId | None:
        return engine.staged

    def scores(self, engine: RolloutEngine) -> tuple[float, ...]:
        return engine.score([1, *range(10, 40)], 2, buffer="active").logprobs

    def test_a_staged_version_is_read_back_and_changes_nothing_that_serves(
        self, engine: RolloutEngine, forge: Forge
    ) -> None:
        before = self.scores(engine)
        signed = forge.version(1)
        staged = engine.stage(signed, forge.store)
        manifest = forge.manifest(1)
        assert (staged.version, staged.digest) == (VersionId(0, 1), manifest.digest())
        assert staged.loaded_digest == loaded_digest(manifest.tensors)
        assert staged.verdict == "verified"
        assert engine.staged == VersionId(0, 1)
        if engine.describe().double_buffer:
            assert self.scores(engine) == before
        else:
            self.one_buffer_comes_back(engine, forge, before)
        ids = [1, *range(10, 40)]
        probe = engine.score(ids, 2, buffer="staged").logprobs
        assert gap(probe, cold_logprobs(forge.cold(1), ids, 2, self.kv)) < self.bar
        engine.commit(DRAIN)
        assert self.scores(engine) == probe
        assert engine.staged is None

    def one_buffer_comes_back(self, engine: RolloutEngine, forge: Forge, before: tuple[float, ...]) -> None:
        """A stage given up leaves what served; meanwhile nothing serves, and no score is of another version."""
        assert engine.serving is None
        assert engine.room == 0
        with pytest.raises(ValueError, match="one buffer"):
            self.scores(engine)
        engine.abort_stage()
        assert self.served(engine)[0] == VersionId(0, 0)
        assert self.scores(engine) == before
        engine.stage(forge.store.read_manifest(VersionId(0, 1)), forge.store)

    @pytest.mark.parametrize(
        ("fault", "message"),
        [
            ("missing", r"tensor model.norm.weight is missing"),
            ("extra", r"tensor model.extra.weight is not part of the model"),
            ("misshapen", r"tensor model.norm.weight has shape \[63\], the model \[64\]"),
            ("dtype", r"tensor model.norm.weight has dtype F16"),
            ("lost", r"tensor model.norm.weight: the store has no blob"),
            ("bent", r"tensor model.norm.weight: blob .* holds bytes"),
        ],
    )
    def test_a_faulty_version_is_refused_by_tensor_and_what_serves_stays(
        self, engine: RolloutEngine, forge: Forge, fault: str, message: str
    ) -> None:
        before, name = self.scores(engine), "model.norm.weight"
        changes: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
            "missing": lambda t: t.pop(name),
            "extra": lambda t: t.update({"model.extra.weight": torch.ones(2, dtype=torch.bfloat16)}),
            "misshapen": lambda t: t.update({name: t[name][:-1]}),
            "dtype": lambda t: t.update({name: t[name].half()}),
            "lost": lambda t: t.update({name: t[name] * 2}),
            "bent": lambda t: t.update({name: t[name] * 2}),
        }
        manifest = forge.manifest(1, change=changes[fault])
        blob = (
            forge.store.path(next(t.digest for t in manifest.tensors if t.name == name))
            if fault not in ("missing",)
            else None
        )
        if fault == "lost" and blob:
            blob.unlink()
        if fault == "bent" and blob:
            blob.chmod(0o600)
            blob.write_bytes(bytes([blob.read_bytes()[0] ^ 1]) + blob.read_bytes()[1:])
        with pytest.raises(StageFailed, match=message):
            engine.stage(sign(manifest, KEY), forge.store)
        assert engine.staged is None
        with pytest.raises(ValueError, match="no staged version"):
            engine.commit(DRAIN)
        assert self.scores(engine) == before
        self.serve(engine, forge, forge.version(2))
        ids = [1, *range(10, 40)]
        assert gap(self.scores(engine), cold_logprobs(forge.cold(2), ids, 2, self.kv)) < self.bar

    def test_an_unsigned_or_foreign_manifest_is_refused(self, engine: RolloutEngine, forge: Forge) -> None:
        before = self.scores(engine)
        manifest = forge.manifest(1)
        good = sign(manifest, KEY)
        for bad in (
            sign(manifest, b"another key"),
            SignedManifest(manifest=good.manifest, mac=""),
            SignedManifest(
                manifest=good.manifest.replace(b'"optimizer_step":1', b'"optimizer_step":2'), mac=good.mac
            ),
        ):
            with pytest.raises(BadManifest, match="signature"):
                engine.stage(bad, forge.store)
        with pytest.raises(StageFailed, match="belongs to job j9"):
            engine.stage(sign(replace(manifest, job="j9"), KEY), forge.store)
        with pytest.raises(StageFailed, match="another model"):
            engine.stage(sign(replace(manifest, model="f" * 64), KEY), forge.store)
        with pytest.raises(StageFailed, match="representation 'other'"):
            engine.stage(sign(replace(manifest, representation="other"), KEY), forge.store)
        assert engine.staged is None
        assert self.scores(engine) == before

    def test_versions_never_fall_and_the_same_one_again_is_nothing(
        self, engine: RolloutEngine, forge: Forge
    ) -> None:
        second = forge.version(2, epoch=1)
        self.serve(engine, forge, second)
        for older in (forge.version(1, epoch=1), forge.version(9, epoch=0)):
            with pytest.raises(OldVersion, match=r"is older than 1\.2"):
                engine.stage(older, forge.store)
        again = engine.stage(second, forge.store)
        assert again.verdict == "verified, unchanged"
        assert engine.staged is None
        assert self.served(engine) == (VersionId(1, 2), again.digest)
        with pytest.raises(StageFailed, match=r"version 1\.2 serves here with digest"):
            engine.stage(sign(forge.manifest(2, seed=3, epoch=1), KEY), forge.store)
        same_bytes = forge.version(3, seed=2, epoch=1)
        assert engine.stage(same_bytes, forge.store).verdict == "verified, unchanged"
        assert engine.commit(DRAIN) is not None
        assert self.served(engine)[0] == VersionId(1, 3)

    def test_a_newer_version_replaces_a_staged_one(self, engine: RolloutEngine, forge: Forge) -> None:
        engine.stage(forge.version(1), forge.store)
        engine.stage(forge.version(2), forge.store)
        assert self.staged(engine) == VersionId(0, 2)
        engine.abort_stage()
        assert self.staged(engine) is None
        assert self.served(engine)[0] == VersionId(0, 0)

    def test_warm_equals_cold_after_every_sync(
        self, make: MakeEngine, engine: RolloutEngine, forge: Forge
    ) -> None:
        for number in range(1, 6):
            signed = forge.version(number, seed=number % 3)
            self.serve(engine, forge, signed)
            cold = self.serve(make(forge.folder, JOB, KEY, 4), forge, signed)
            assert self.scores(engine) == self.scores(cold)

    def test_staging_in_another_thread_disturbs_no_request(self, engine: RolloutEngine, forge: Forge) -> None:
        self.needs_two_buffers(engine)
        wanted = requests(24)
        expected = run(engine, wanted)
        versions = [forge.version(number) for number in range(1, 6)]
        probes: list[float] = []

        def stage() -> None:
            for signed in versions:
                engine.stage(signed, forge.store)
                probes.append(engine.score([1, *range(10, 40)], 2, buffer="staged").logprobs[0])

        thread = threading.Thread(target=stage)
        thread.start()
        rounds = 0
        while thread.is_alive() or rounds == 0:
            for name, (chunk,) in run(engine, wanted).items():
                assert chunk.tokens == expected[name][0].tokens
                assert chunk.version == VersionId(0, 0)
            rounds += 1
        thread.join()
        assert len(set(probes)) == 5

    # ---- memory
    def test_sleep_gives_memory_back_and_wake_serves_the_same(self, make: MakeEngine, tmp_path: Path) -> None:
        """About 100 million parameters, so that what is kept would show."""
        folder = tmp_path / "models" / "large"
        folder.mkdir(parents=True)
        config = AutoConfig.from_pretrained(MODELS / "tiny-dense")
        config.update(
            {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "head_dim": 64}
        )
        config.update(
            {"num_attention_heads": 16, "num_key_value_heads": 8, "layer_types": ["full_attention"] * 6}
        )
        config.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((MODELS / "tiny-dense" / file).read_bytes())
        forge = self.forged(tmp_path, folder)
        small = self.forged(tmp_path / "small", MODELS / "tiny-dense")
        run(
            self.serve(make(small.folder, JOB, KEY, 4), small, small.version(0)), requests(4)
        )  # first-use costs
        forge.version(0), forge.version(1)
        plain.cache_clear()
        engine = make(folder, JOB, KEY, 16)
        engine.sleep()
        baseline = resident()
        self.serve(engine, forge, forge.store.read_manifest(VersionId(0, 0)))
        self.serve(engine, forge, forge.store.read_manifest(VersionId(0, 1)))
        run(engine, requests(16))
        before, awake = self.scores(engine), resident()
        assert awake > baseline + self.heavy * 2**20, "the model is too small for this test to fail"
        engine.submit(requests(1)[0])
        with pytest.raises(ValueError, match="1 requests run"):
            engine.sleep()
        while engine.running:
            engine.step()
        engine.sleep()
        assert resident() < 1.1 * baseline
        assert engine.serving is None
        assert engine.room == 0
        assert engine.wake(forge.store) == VersionId(0, 1)
        assert self.scores(engine) == before
        engine.sleep()
        assert resident() < 1.1 * baseline


def resident() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)
