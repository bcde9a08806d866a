"""The rollout worker of one job.

consumes      `work` (group rollout; that of an evaluation that is the job's `guest`, too), `sync`, `phases` and
              `probes` (own cursors), the store's manifests and blobs, what environments answer to a turn
produces      `trajectories` through the ledger, score errands, `acks`, `probed`, `Slept`, `Woke` and `Emptied`, its
              line in `workers`
waits for     an order to wake (`device` while its memory is used up), a verified version, an open gate, work, the
              ledger's `go` where beginning now would break the lag bound
unblocked by  the scheduler's phases and submissions, sync's orders, other engines that sleep, updates made
"""

from __future__ import annotations

import gc
import time

from syncline.contract.events import WorkerUp
from syncline.rollout.worker import Worker, assemble
from syncline.runtime.service import ServiceContext


def main(context: ServiceContext) -> None:
    """Serve until told to stop. What runs then may end within the settings' `drain`; the rest is handed back."""
    worker = assemble(context)
    gc.freeze()  # what is there now lives for ever: looking through it at each sleep took 0.2 s
    worker.intake.recover()
    context.emit(WorkerUp(who=context.name, incarnation=context.incarnation))
    while not context.stop_requested():
        worker.inbox.read(worker.idle_for())
        worker.residence.obey()
        worker.orders.advance(worker.residence.awake)
        worker.orders.join(worker.residence.awake)
        worker.probes.answer()
        take_work(worker)
        empty(worker)
        if worker.engine.running:
            began = time.monotonic()
            chunks = worker.engine.step()
            worker.pace.worked(time.monotonic() - began)
            worker.sessions.take(chunks)
        worker.sessions.go_on(worker.engine)
        for trajectory, why in worker.sessions.failed():
            worker.fail(trajectory, why)
        worker.probes.sampled(worker.publish())
        worker.teller.tell()
        unready = worker.teller.unready()
        context.ready(unready == "", unready)
    leave(worker, time.monotonic() + context.settings.drain)
    worker.tools.close()
    worker.orders.close()


def leave(worker: Worker, end: float) -> None:
    """Let what runs end until the monotonic second `end`, begin nothing, and hand back what is left."""
    while worker.engine.running and time.monotonic() < end:
        give_up_lost(worker)
        worker.sessions.take(worker.engine.step())
        worker.publish()
    worker.publish(last=True)
    worker.intake.hand_back()
    worker.guests.hand_back()


def empty(worker: Worker) -> None:
    """One worker too many: hand back what it has not begun, and say so once the rest has ended."""
    if not worker.residence.leaves:
        return
    worker.intake.hand_back(begun=False)
    worker.guests.hand_back(begun=False)
    if not worker.intake.held and not worker.guests.held:
        worker.residence.say_emptied()


def take_work(worker: Worker) -> None:
    """Begin what may begin. From the ledger's `go` to the prefill in the next step, no version is committed."""
    give_up_lost(worker)
    serving = worker.engine.serving
    if serving is None or not worker.residence.gate_open:
        return
    worker.guests.take(serving, worker.room, not worker.intake.held, worker.submit)
    worker.intake.take(worker.room, soon=worker.residence.others_leave)
    worker.intake.begin(serving[0], worker.room, worker.submit)


def give_up_lost(worker: Worker) -> None:
    """Say that this worker lives, and stop what was taken over from it."""
    for lost in (*worker.intake.keep_alive(), *worker.guests.look()):
        worker.engine.abort(lost)
        worker.sessions.forget(lost)
