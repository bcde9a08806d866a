"""All requests of one engine: those on their way, and those that wait for the server to be open again."""

from __future__ import annotations

import threading

from syncline.rollout.engine import Chunk, Request
from syncline.rollout.engines.sglang.client import Refused, Server, ServerGone
from syncline.rollout.engines.sglang.flight import Flight, Serving, longest, refused
from syncline.rollout.engines.sglang.labels import Attested, Untrue
from syncline.rollout.engines.sglang.model import Model
from syncline.rollout.engines.sglang.pump import Pump, Reply

_BLOCK = 0.05  # seconds that a step waits for replies at most
_FAILURES = 5  # legs of one request that may get lost in succession


class Flights:
    """Safe for the loop's thread and the staging thread together. `draining`: nothing begins, what runs goes on."""

    def __init__(self, model: Model, limit: int) -> None:
        self._model, self._limit = model, limit
        self._pump = Pump()
        self._lock = threading.RLock()
        self._flights: dict[str, Flight] = {}
        self._serving: Serving | None = None
        self.draining = False
        self.sampled = 0
        self.used: set[str] = set()  # adapters that legs were sent under

    @property
    def open(self) -> bool:
        """Whether legs may be sent."""
        return self._serving is not None

    @property
    def running(self) -> int:
        return len(self._flights)

    @property
    def room(self) -> int:
        return self._limit - len(self._flights)

    def adapters(self) -> set[str]:
        """Adapters that legs on their way use."""
        with self._lock:
            return {f.sent.adapter for f in self._flights.values() if f.sent and f.sent.adapter}

    # ---- begin and end
    def add(self, request: Request, room: int) -> None:
        """Take a request in. Raises `ValueError` naming it and why it cannot run."""
        name, sampling = request.trajectory, request.sampling
        with self._lock:
            if name in self._flights:
                raise ValueError(f"trajectory {name} runs already")
            self._model.check_prompt(name, request.prompt, sampling.max_tokens)
            if why := refused(sampling):
                raise ValueError(f"trajectory {name}: {why}")
            if room < 1:
                raise ValueError(f"trajectory {name}: no room ({self.running} of {self._limit} run)")
            most = longest(sampling, request.seed)
            self._flights[name] = Flight(request, most, self._model.stop_ids)

    def drop(self, trajectory: str) -> str | None:
        """Forget a request; its leg's rid, empty if none is on its way. None: it is not here."""
        with self._lock:
            flight = self._flights.pop(trajectory, None)
            if flight is None:
                return None
            return flight.rid if flight.sent is not None else ""

    def close(self) -> None:
        """Send nothing more."""
        with self._lock:
            self._serving = None

    def reopen(self, serving: Serving) -> None:
        """Send under `serving` from now on."""
        with self._lock:
            self._serving, self.draining = serving, False

    def end_all(self) -> list[str]:
        """The rids of all legs on their way, which are about to be told to end."""
        with self._lock:
            ending = [f for f in self._flights.values() if f.sent is not None]
            for flight in ending:
                flight.ending = True
            return [flight.rid for flight in ending]

    def settled(self, seconds: float) -> bool:
        """Wait until no leg is on its way."""
        return self._pump.wait_empty(seconds)

    # ---- legs
    def send(self, server: Server) -> None:
        """Send the next leg of every request that has none on its way."""
        with self._lock:
            serving = self._serving
            if serving is None:
                return
            for flight in self._flights.values():
                if flight.sent is None:
                    body = flight.body()
                    flight.sent = serving
                    if serving.adapter is not None:
                        body["lora_path"] = serving.adapter
                        self.used.add(serving.adapter)
                    trace = flight.request.traceparent
                    headers = {"traceparent": trace} if trace else {}
                    self._pump.send(server, (flight, flight.rid), body, headers)

    def land(self) -> list[Chunk]:
        """Chunks of the replies that came. Raises `Untrue` for one that cannot be."""
        out: list[Chunk] = []
        for (flight, rid), reply in self._pump.land(_BLOCK if self._flights else 0.0):
            with self._lock:
                known = self._flights.get(flight.request.trajectory)
                if known is not None and known is flight and known.rid == rid:
                    out += self._landed(known, reply)
        return out

    def _landed(self, flight: Flight, reply: Reply) -> list[Chunk]:
        name, sent = flight.request.trajectory, flight.sent
        if isinstance(reply, ServerGone) or (isinstance(reply, Refused) and flight.ending):
            flight.sent = None
            flight.failures += 0 if flight.ending else 1
            if flight.failures > _FAILURES:
                raise Untrue(f"trajectory {name}: {_FAILURES} legs were lost: {reply}")
            return []
        if isinstance(reply, Refused):
            raise Untrue(f"trajectory {name}: {reply}")
        if sent is None:
            raise Untrue(f"trajectory {name}: a reply without a leg")
        chunks = [self._checked(span, chunk, sent) for span, chunk in flight.land(reply, self._model.routing)]
        flight.failures = 0
        self.sampled += sum(len(chunk.tokens) for chunk in chunks)
        if chunks and chunks[-1].finish is not None:
            del self._flights[name]
        return chunks

    def _checked(self, span: Attested, chunk: Chunk, sent: Serving) -> Chunk:
        """`chunk`, if the server attests the version that its leg was sent under."""
        if span.label != sent.label:
            raise Untrue(
                f"trajectory {chunk.trajectory}: the server attests weight version {span.label!r} for tokens "
                f"{span.start} to {span.end} of a leg that was sent under {sent.label!r}"
            )
        return chunk

    def close_pump(self) -> None:
        """End the thread that holds requests."""
        self._pump.close()
