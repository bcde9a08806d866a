"""System calls that sandboxed code may not make: a seccomp filter, put together here since it is thirty lines.

It holds without privilege and where no namespace is permitted. It closes what resource limits leave open: processes of
root, memory that no limit counts (memfd, System V), sockets where the network could not be left, signals to others, and
ways into other processes or out of the sandbox.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

_LD, _JEQ, _JSET, _JGE, _RET = 0x20, 0x15, 0x45, 0x35, 0x06  # BPF: load word, three jumps, return
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000
_PR_SET_SECCOMP, _FILTER = 22, 2


class Line(NamedTuple):
    """One instruction; where a jump that names no label goes on with the next. Jumps go forward alone."""

    code: int
    operand: int
    yes: str = ""
    no: str = ""
    label: str = ""


class _Table(NamedTuple):
    """Numbers of one architecture."""

    arch: int  # AUDIT_ARCH_*
    clone: int
    clone3: int
    socket: int
    signals: tuple[
        int, ...
    ]  # kill, tkill, tgkill: each has the process, or its first thread, as first argument
    refused: dict[str, int]


_TABLES = {
    "x86_64": _Table(
        arch=0xC000003E,
        clone=56,
        clone3=435,
        socket=41,
        signals=(62, 200, 234),
        refused={
            "fork": 57, "vfork": 58, "shmget": 29, "semget": 64, "msgget": 68, "memfd_create": 319, "memfd_secret": 447,
            "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438, "kcmp": 312,
            "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428, "move_mount": 429,
            "fsopen": 430, "fsmount": 432, "mount_setattr": 442, "unshare": 272, "setns": 308, "bpf": 321,
            "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "keyctl": 250, "add_key": 248,
            "request_key": 249, "open_by_handle_at": 304, "init_module": 175, "finit_module": 313, "kexec_load": 246,
            "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424, "mknod": 133, "mknodat": 259,
        },
    ),
    "aarch64": _Table(
        arch=0xC00000B7,
        clone=220,
        clone3=435,
        socket=198,
        signals=(129, 130, 131),
        refused={
            "shmget": 194, "semget": 190, "msgget": 186, "memfd_create": 279, "memfd_secret": 447, "ptrace": 117,
            "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_getfd": 438, "kcmp": 272, "mount": 40,
            "umount2": 39, "pivot_root": 41, "chroot": 51, "open_tree": 428, "move_mount": 429, "fsopen": 430,
            "fsmount": 432, "mount_setattr": 442, "unshare": 97, "setns": 268, "bpf": 280, "perf_event_open": 241,
            "userfaultfd": 282, "io_uring_setup": 425, "keyctl": 219, "add_key": 217, "request_key": 218,
            "open_by_handle_at": 265, "init_module": 105, "finit_module": 273, "kexec_load": 104, "mknodat": 33,
            "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "pidfd_send_signal": 424,
        },
    ),
}  # fmt: skip


def program(network: bool, pid: int) -> bytes:
    """The filter for this machine, `b""` where we know no numbers for it.

    network   whether sockets may be made
    pid       the one process that may be sent signals, as it sees itself
    """
    table = _TABLES.get(os.uname().machine)
    if table is None:
        return b""
    denied = [*table.refused.values(), *([] if network else [table.socket])]
    lines: list[Line] = [
        Line(_LD, _ARCH),
        Line(_JEQ, table.arch, no="kill"),
        Line(_LD, _NUMBER),
        Line(_JGE, _X32, yes="refuse"),  # the x32 numbers, which would be another way to each call
        Line(
            _JEQ, table.clone3, yes="unknown"
        ),  # its flags lie in memory, where no filter can look; libc falls back
        Line(_JEQ, table.clone, yes="clone"),
        *(Line(_JEQ, number, yes="signal") for number in table.signals),
        *(Line(_JEQ, number, yes="refuse") for number in denied),
        Line(_RET, _ALLOW),
        Line(_LD, _FIRST_ARGUMENT, label="clone"),
        Line(_JSET, _CLONE_THREAD, yes="allow"),  # a thread: as far as its limit lets it
        Line(_RET, _ERRNO | errno.EAGAIN),
        Line(_LD, _FIRST_ARGUMENT, label="signal"),
        Line(_JEQ, pid, yes="allow"),
        Line(_RET, _ERRNO | errno.EPERM, label="refuse"),
        Line(_RET, _ERRNO | errno.ENOSYS, label="unknown"),
        Line(_RET, _KILL, label="kill"),
        Line(_RET, _ALLOW, label="allow"),
    ]
    return assembled(lines)


def assembled(lines: Sequence[Line]) -> bytes:
    """Machine code of a filter, its labels resolved."""
    places = {line.label: place for place, line in enumerate(lines) if line.label}
    made = []
    for place, line in enumerate(lines):
        yes, no = (places[to] - place - 1 if to else 0 for to in (line.yes, line.no))
        made.append(struct.pack("HBBI", line.code, yes, no, line.operand))
    return b"".join(made)


def install(libc: ctypes.CDLL, code: bytes) -> bool:
    """Let this thread, and what it starts, make no refused call from now on. False: not permitted.

    Needs `no_new_privs`.
    """
    if not code:
        return False
    held = ctypes.create_string_buffer(code, len(code))
    fprog = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    pointer = ctypes.create_string_buffer(fprog, len(fprog))
    return bool(libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_void_p(ctypes.addressof(pointer)), 0, 0) == 0)
