"""Questions of the trainer: what does this engine score for these tokens under the version that it serves?

A probe waits until its version serves and is answered between decode steps, one in each turn of the loop. Before a
newer version is committed, those that still wait for the serving one are answered together, within bounds: after the
commit nobody can. A probe whose version is past is answered `missed`; no probe goes without an answer while the
worker lives, and none can stop it.

Unasked, a worker compares decode with prefill: once for each measured version, for the first trajectory that ended
while its one version still served.

A worker that starts takes up the probes of the newest update alone: the trainer has closed the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from syncline.contract.diagnosis import Probe, Probed
from syncline.contract.job import JobSpec
from syncline.contract.streams import PROBED, PROBES
from syncline.contract.token_path import Trajectory
from syncline.contract.version_path import VersionId
from syncline.rollout.engine import RolloutEngine
from syncline.runtime.bus import Bus, unpack

_LOG = logging.getLogger("syncline.rollout")
CAP = 1_000  # answers that the stream keeps
AT_COMMIT = 64  # answers given at most before a commit
COMMIT_SECONDS = 1.0  # for which a commit waits for them at most
_NEWEST = 256  # entries looked through at the start


class Probes:
    """The probes of one worker that are not answered yet, oldest first."""

    def __init__(self, bus: Bus, engine: RolloutEngine, spec: JobSpec, job: str, name: str) -> None:
        self._bus, self._engine, self._name = bus, engine, name
        self._spec = spec.diagnostics
        self._compared: VersionId | None = None  # decode with prefill
        self.key, self._answers = PROBES.at(job), PROBED.at(job)
        self._wide = engine.describe().kv == "wide"
        self._pending: list[Probe] = []
        self.cursor = self._recover()

    def _recover(self) -> str:
        """Take up what a worker before this one may have left; returns the cursor for what comes."""
        rows = self._bus.newest(self.key, _NEWEST)
        probes = [unpack(entry, Probe) for entry in rows]
        last = max((probe.update for probe in probes), default=0)
        for probe in probes:
            if probe.update == last:
                self.take(probe)
        return rows[-1].id if rows else "0"

    @property
    def ready(self) -> bool:
        """Whether a probe could be answered now."""
        serving = self._engine.serving
        return serving is not None and any(probe.version <= serving[0] for probe in self._pending)

    def take(self, probe: Probe) -> None:
        """Note a probe that is addressed to this worker. Others are not."""
        if probe.worker == self._name:
            self._pending.append(probe)

    def sampled(self, ended: Sequence[Trajectory]) -> None:
        """Take notice of trajectories that have just ended; one of each version is scored again at once."""
        serving = self._engine.serving
        if serving is None or serving[0] == self._compared or not self._spec.trajectories:
            return
        if serving[0].number % self._spec.every:
            return
        for t in ended:
            if t.mask is not None:  # its log-probs are of the cut distribution, and no engine's score is
                continue
            if len(t.spans) == 1 and t.spans[0].version == serving[0] and t.spans[0].context == "recomputed":
                self._compare(t)
                return

    def _compare(self, t: Trajectory) -> None:
        version = self._compared = t.spans[0].version
        positions = [i for s in t.segments if s.kind == "sampled" for i in range(s.start, s.end)]
        temperature = t.convention.temperature
        try:
            score = self._engine.score(
                t.tokens, positions[0], buffer="active", temperature=temperature, positions=positions
            )
        except (ValueError, ConnectionError) as error:  # as in `_score`
            _LOG.warning("decode of %s was not compared with prefill: %s", t.trajectory, error)
            return
        said = Probed(
            update=version.number + 1,
            version=version,
            trajectory=t.trajectory,
            worker=self._name,
            logprobs=score.logprobs,
            decode=tuple(t.logprobs),
        )
        self._bus.append(self._answers, said, cap=CAP)

    def answer(self) -> None:
        """Answer one probe of the serving version, if there is one, and all whose version is past."""
        self._answer(1, float("inf"))

    def before_commit(self) -> None:
        """Answer what waits for the version that is about to be replaced, within `AT_COMMIT` and `COMMIT_SECONDS`."""
        self._answer(AT_COMMIT, time.monotonic() + COMMIT_SECONDS)

    def _answer(self, count: int, until: float) -> None:
        serving = self._engine.serving
        if serving is None or not self._pending:
            return
        left: list[Probe] = []
        for probe in self._pending:
            if probe.version < serving[0]:
                self._say(probe, missed=f"serves {serving[0]} already")
            elif probe.version == serving[0] and count > 0 and time.monotonic() < until:
                count -= 1
                self._score(probe)
            else:
                left.append(probe)
        self._pending = left

    def _score(self, probe: Probe) -> None:
        try:
            score = self._engine.score(
                probe.tokens,
                probe.positions[0],
                buffer="active",
                experts=probe.experts,
                temperature=probe.temperature,
                positions=probe.positions,
            )
            wide = () if self._wide else self._wide_kv(probe)
        except (
            ValueError,
            ConnectionError,
        ) as error:  # what has no score measures nothing, and stops nothing
            _LOG.warning("probe of %s: %s", probe.trajectory, error)
            self._say(probe, missed=str(error))
            return
        routed = score.experts
        self._say(
            probe,
            logprobs=score.logprobs,
            wide_kv=wide,
            experts=b"" if routed is None else routed.data,
            experts_shape=None if routed is None else routed.shape,
            experts_dtype="u1" if routed is None else routed.dtype,
        )

    def _wide_kv(self, probe: Probe) -> tuple[float, ...]:
        score = self._engine.score(
            probe.tokens,
            probe.positions[0],
            buffer="active",
            kv="wide",
            temperature=probe.temperature,
            positions=probe.positions,
        )
        return score.logprobs

    def _say(self, probe: Probe, **answer: object) -> None:
        said = Probed(
            update=probe.update,
            version=probe.version,
            trajectory=probe.trajectory,
            worker=self._name,
            **answer,  # type: ignore[arg-type]
        )
        self._bus.append(self._answers, said, cap=CAP)
