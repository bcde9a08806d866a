"""The lease that backs the phases up: an engine that wakes holds memory of its device, or waits for it."""

from __future__ import annotations

from syncline.contract.events import Mode
from syncline.contract.job import JobSpec
from syncline.runtime.lease import Devices
from syncline.trainer.waiting import Waiting

_MIB = 1 << 20


class DeviceOverdue(RuntimeError):
    """The device had no memory free within `limits.activation_wait`. The message says who holds it."""


class Device:
    """The trainer's share of a device.

    Colocated, the device is shared with rollout and the trainer takes all of it: were one rollout engine still
    awake, it could not. Disjoint, the trainer has a device of its own.
    """

    def __init__(self, devices: Devices, spec: JobSpec, job: str, name: str) -> None:
        self._devices, self._spec, self._job, self._name = devices, spec, job, name
        self._waiting = Waiting()
        self._held = ""

    def take(self, mode: Mode, needed: int) -> str:
        """Try to lease; returns "" when it is ours, else who holds it, for the status.

        needed   bytes that the engine will take
        Raises `ValueError` naming the key if it can never fit, `DeviceOverdue` after the deadline.
        """
        budget = self._spec.device.memory_mb * _MIB
        if needed > budget:
            raise ValueError(
                f"device.memory_mb: the trainer needs {needed // _MIB + 1} MB, the device has {budget // _MIB}"
            )
        device = f"{self._job}/{'shared' if mode == 'colocated' else 'trainer'}"
        waited = self._waiting.go()
        if self._devices.acquire(device, self._name, budget, budget):
            self._waiting.stop()
            self._held = device
            return ""
        leases = self._devices.holders(device).items()
        holders = ", ".join(f"{name} ({lease.nbytes // _MIB} MB)" for name, lease in leases)
        if waited > self._spec.limits.activation_wait:
            raise DeviceOverdue(f"no memory of device {device} within {waited:.0f} s: held by {holders}")
        return f"device {device} is held by {holders}"

    def release(self) -> None:
        """Give it back, if it is held, and stop waiting for it."""
        self._waiting.stop()
        if self._held:
            self._devices.release(self._held, self._name)
            self._held = ""
