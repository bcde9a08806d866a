"""The route that tells how it stands with a job's trackers."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Depends, Response

from syncline.gateway.access import Here, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.tracking import TrackerView

router = APIRouter(prefix="/v1/jobs/{job}", tags=["jobs"], dependencies=[Depends(only_known_parameters)])


class TrackerList(msgspec.Struct, frozen=True, kw_only=True):
    """Trackers that the job's spec wants. One that fails never stops a job."""

    items: list[TrackerView]


_EXAMPLE = TrackerList(
    items=[
        TrackerView(tracker="tensorboard", state="following", update=12, failures=0, reason=""),
        TrackerView(
            tracker="wandb",
            state="failing",
            update=0,
            failures=2,
            reason="ValueError: WANDB_API_KEY is not set in the gateway's environment",
        ),
    ]
)


@router.get("/tracking", responses=describe(TrackerList, _EXAMPLE))
def tracking(record: TheJob, here: Here) -> Response:
    """How far each tracker is, and why one fails."""
    return reply(TrackerList(items=here.trackers.views(record.id, record.spec)))
