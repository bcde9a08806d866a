"""Walls around a process that runs user code, put up once at its start: namespaces, where the kernel permits them.

`enclose` gives the process that calls it no network, no sight of other processes, a file system that it can only
read, and in place of what is secret or shared (the run root, /tmp, /run, devices, keys in the home folder) nothing. The
caller goes on in a child, the first process of its namespace: it cannot be signalled from inside, and all that it left
running ends with it. Where that is not permitted (a container that forbids namespaces), the network alone is left, and
`Walls` says what is missing: the limits, the filter of system calls and the end at the deadline (`sandbox.py`) hold
everywhere.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from syncline.runtime.sandbox_child import LIBC, die_with_parent

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV = 4096, 16384, 1 << 18, 2, 4
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAP_HEADER = struct.pack("II", 0x20080522, 0)
_KEPT_RIGHTS = (0, 1, 3, 5, 6, 7)  # chown, read and remove what a sandbox left, kill, and become another user
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
SCRATCH = Path("/var/tmp")  # the one folder that can be written, where there are walls
_SCRATCHES: list[Path] = []  # once it is this process's own
SCRATCH_OPTIONS = "size=64m,nr_inodes=1024,mode=1777"
_DEVICES = tuple(Path("/dev") / name for name in ("null", "zero", "full", "random", "urandom"))
_SHARED = ("/dev", "/tmp", "/run", "/var/run/secrets", "/var/lib/docker", "/mnt/secrets")
_HOME = (
    ".ssh",
    ".aws",
    ".config",
    ".kube",
    ".docker",
    ".gnupg",
    ".netrc",
    ".git-credentials",
    ".pgpass",
    ".cache/wandb",
)
_FILES = ("/etc/shadow", "/etc/gshadow")
_DATA = ("SYNCLINE_DATA", "SYNCLINE_MODELS")
_PASSED = ("PATH", "HOME", "LANG", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", *_DATA)
_PASSED_KINDS = ("PYTHON", "LC_", "OMP_", "MKL_", "OPENBLAS_")


class Walls(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around a process: False where the kernel did not permit it."""

    network: bool = False  # it has left the network
    processes: bool = False  # it sees and signals no process but its own
    files: bool = (
        False  # it reads the file system without what is secret, and writes to a scratch folder alone
    )

    def missing(self, wanted_network: bool) -> str:
        """What does not hold, in words; "" for nothing. `wanted_network`: its code was given the network."""
        lacking = (
            []
            if self.network or wanted_network
            else ["the network could not be left (system calls are refused)"]
        )
        lacking += [] if self.processes else ["other processes are in sight"]
        lacking += [] if self.files else ["files are bounded by the user's rights alone"]
        return "; ".join(lacking)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a process with user code inherits of an environment: where things are, and nothing that could be secret."""
    return {
        name: value
        for name, value in given.items()
        if name in _PASSED or any(name.startswith(kind) for kind in _PASSED_KINDS)
    }


def hidden(more: Iterable[Path]) -> tuple[Path, ...]:
    """What user code has no business with: what the installation says (`Settings.secrets`), and the usual places."""
    home = (Path.home() / name for name in _HOME)
    return (*more, *map(Path, (*_SHARED, *_FILES)), *home)


def needed(more: Iterable[Path]) -> tuple[Path, ...]:
    """Where the interpreter, its modules and the data are, though they may lie in a hidden folder."""
    places = [sys.prefix, sys.base_prefix, *sys.path, *map(str, more)]
    return tuple(Path(place).absolute() for place in places if place)


def around(secrets: Sequence[str], *, network: bool) -> str:
    """`enclose` for a process that runs a job's code. Returns what is missing, and says it on standard error."""
    data = [Path(os.environ[name]) for name in _DATA if name in os.environ]
    missing = enclose(hidden(map(Path, secrets)), needed(data), network=network).missing(network)
    if missing:
        sys.stderr.write(f"walls of the sandbox that the kernel does not permit: {missing}\n")
    return missing


def enclose(hide: Sequence[Path], keep: Sequence[Path], *, network: bool) -> Walls:
    """Put up what can be put up. Call it before user code is imported, in a process with one thread.

    hide      folders and files that shall look empty
    keep      folders below hidden ones that shall be seen nevertheless; one that is itself hidden stays hidden
    network   its code was given the network
    """
    _checked("prctl", LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    space = (0 if network else _NEWNET) | _NEWNS | _NEWIPC | _NEWPID
    for flags in (space, space | _NEWUSER):
        if _permitted(flags, hide, keep):
            _into(flags)
            _files(hide, keep)
            _SCRATCHES.append(SCRATCH)
            walls = Walls(network=not network, processes=True, files=True)
            break
    else:
        walls = Walls(network=not network and leave_network())
    _checked("prctl", LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))  # its children may not look into its memory
    shed(_KEPT_RIGHTS)
    return walls


def shed(kept: Sequence[int]) -> None:
    """Give up every privilege of root but these capabilities, for good."""
    for number in range(64):
        if number not in kept:
            LIBC.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # refused where there is nothing to give up
    held = ctypes.create_string_buffer(24)
    _checked("capget", LIBC.capget(_CAP_HEADER, held))
    effective, permitted = struct.unpack("II", held.raw[:8])
    mask = sum(1 << number for number in kept)
    left = struct.pack("IIIIII", effective & mask, permitted & mask, 0, 0, 0, 0)
    _checked("capset", LIBC.capset(_CAP_HEADER, left))


def empty_scratch() -> None:
    """Take away what a sandbox left in the scratch folder; nothing where there is none."""
    if _SCRATCHES:
        for entry in os.scandir(SCRATCH):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)


def leave_network() -> bool:
    """Leave the network, with every process forked from now on. False: the kernel does not permit it.

    The second way needs no privilege, but a process with one thread: call it before a library starts others.
    """
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(_NEWNET) == 0:
        return True
    if LIBC.unshare(_NEWUSER | _NEWNET) != 0:
        return False
    _same_user(user, group)
    return True


# ---- namespaces -------------------------------------------------------------------------------------------
def _permitted(flags: int, hide: Sequence[Path], keep: Sequence[Path]) -> bool:
    """Whether all of it can be done: tried in a process that ends with the trial, since half of it cannot be undone."""
    trial = os.fork()
    if trial == 0:
        code = 1
        try:
            _into(flags)
            _files(hide, keep)
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    return os.waitpid(trial, 0)[1] == 0


def _into(flags: int) -> None:
    """Go on as the first process of new namespaces; the one that called waits for the end, and ends as it did."""
    user, group = os.getuid(), os.getgid()
    _checked("unshare", LIBC.unshare(flags))
    if flags & _NEWUSER:
        _same_user(user, group)
    child = os.fork()
    if child == 0:
        die_with_parent()
        return
    os.closerange(0, 3)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # its own process group is told, too
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _same_user(user: int, group: int) -> None:
    """Be in the new user namespace who we were outside, and nobody else."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def _files(hide: Sequence[Path], keep: Sequence[Path]) -> None:
    hide = tuple(dict.fromkeys(path.resolve() for path in hide if os.path.exists(path)))
    keep = tuple(dict.fromkeys(path.resolve() for path in (*keep, *_DEVICES) if os.path.exists(path)))
    here = os.getcwd()
    kept = {
        path: os.open(path, os.O_PATH)
        for path in keep
        if any(h in path.parents for h in hide) and path not in hide
    }
    _mount("none", Path("/"), None, _REC | _PRIVATE)
    _mount("proc", Path("/proc"), "proc", _NOSUID | _NODEV)
    for path in sorted(hide):  # what is below another hidden one is gone with it, unless that was kept
        if not os.path.exists(path):
            continue
        if path.is_dir():
            _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
        else:
            _mount("/dev/null", path, None, _BIND)
        for folder, handle in kept.items():
            if path in folder.parents:
                _shown(folder, handle)
    for handle in kept.values():
        os.close(handle)
    _read_only()
    if SCRATCH.is_dir():
        _mount("tmpfs", SCRATCH, "tmpfs", _NOSUID | _NODEV, SCRATCH_OPTIONS)
    os.chdir("/")  # where we stood may be below a mount that hides it, and would lead around it
    if os.path.isdir(here):
        os.chdir(here)


def _shown(path: Path, handle: int) -> None:
    if os.path.isdir(f"/proc/self/fd/{handle}"):
        path.mkdir(parents=True, exist_ok=True)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    _mount(f"/proc/self/fd/{handle}", path, None, _BIND | _REC)


def _read_only() -> None:
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", _READ_ONLY, 0, 0, 0))
    told = LIBC.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, 32)
    _checked("mount_setattr", told)


def _mount(source: str, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    given = (
        source.encode(),
        os.fsencode(target),
        None if kind is None else kind.encode(),
        flags,
        options.encode(),
    )
    _checked(f"mount {target}", LIBC.mount(*given))


def _checked(what: str, told: int) -> None:
    if told != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
