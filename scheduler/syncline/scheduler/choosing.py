"""Which launcher makes the processes of jobs, as the settings say."""

from __future__ import annotations

from syncline.runtime.service import ServiceContext
from syncline.runtime.settings import OWN_SECRETS, Settings
from syncline.scheduler.launch.launcher import Launcher
from syncline.scheduler.launch.local import LocalLauncher
from syncline.scheduler.placement import COMMANDS, POD_COMMANDS, Commands
from syncline.scheduler.stack import jobs_state


def launcher_of(ctx: ServiceContext) -> Launcher:
    """The launcher of the scheduler `ctx`; waits until it is the only one. Raises `ValueError` naming what is wrong."""
    match ctx.settings.launcher:
        case "local":
            return LocalLauncher(jobs_state(ctx.settings.runs), withhold=OWN_SECRETS)
        case "kubernetes":
            from syncline.scheduler.launch.kubernetes.launcher import (
                KubernetesLauncher,  # the extra `kubernetes`
            )
            from syncline.scheduler.launch.kubernetes.plan import read

            assert ctx.settings.launcher_file is not None  # settings
            ctx.ready(False, "waits for the lease in the cluster")
            try:
                plan = read(ctx.settings.launcher_file.read_text())
            except OSError as error:
                raise ValueError(f"SYNCLINE_LAUNCHER_FILE: {error}") from None
            return KubernetesLauncher(plan, ctx.thread, ctx.incarnation, ctx.stopping)
    raise ValueError(f"SYNCLINE_LAUNCHER {ctx.settings.launcher!r} is unknown")


def commands_of(settings: Settings) -> Commands:
    """What to run for each service of a job: this interpreter, or that of the image."""
    return POD_COMMANDS if settings.launcher == "kubernetes" else COMMANDS
