"""`launcher.yaml`: how the pods of jobs are made in this installation, as the chart wrote it (decision 0017)."""

from __future__ import annotations

from typing import Any

import msgspec

RUNS, MODELS, CACHE = "/runs", "/models", "/cache"
HEALTH = 8081  # port of /started, /health and /ready in every pod
ROLES = ("rollout", "trainer", "sync", "colocated")

Raw = dict[str, Any]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    """A part of the file. Unknown keys are refused."""


class Images(Part, frozen=True, kw_only=True):
    """One image per role; `python -m syncline.<role>` must run there, and in `colocated` both engines."""

    rollout: str
    trainer: str
    sync: str
    colocated: str


class SecretKey(Part, frozen=True, kw_only=True):
    """Where a variable's value lies."""

    secret: str
    key: str


class Claim(Part, frozen=True, kw_only=True):
    """A volume that pods share."""

    claim: str
    sub_path: str = ""


class Space(Part, frozen=True, kw_only=True):
    """Room of a pod's own."""

    size_limit: str


class Role(Part, frozen=True, kw_only=True):
    """What pods of one role get besides. `pod` is merged over the pod's template at the very end."""

    resources: Raw = {}
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: dict[str, str] = {}
    tolerations: list[Raw] = []
    affinity: Raw = {}
    topology_spread: list[Raw] = []
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    pod: Raw = {}


class Roles(Part, frozen=True, kw_only=True):
    """By role. What proves versions has a trainer's engine, and so a trainer's pods."""

    rollout: Role = Role()
    trainer: Role = Role()
    sync: Role = Role()
    colocated: Role = Role()

    def of(self, role: str) -> Role:
        """The role's part. Raises `ValueError` for one that has no pods."""
        match role:
            case "rollout":
                return self.rollout
            case "trainer" | "validator" | "validation":
                return self.trainer
            case "sync":
                return self.sync
            case "colocated":
                return self.colocated
        raise ValueError(f"role {role!r} is none of {', '.join(ROLES)}")


class PodPlan(Part, frozen=True, kw_only=True):
    """The whole file. `namespace`: None: the one that the scheduler itself is in. `owner`: a ConfigMap of the release,
    with whose end its jobs end; "": they outlive it."""

    release: str
    namespace: str | None = None
    lease: str
    owner: str = ""
    service_account: str
    images: Images
    pull_policy: str = "IfNotPresent"
    pull_secrets: list[str] = []
    env: dict[str, str] = {}
    secret_env: dict[str, SecretKey] = {}
    runs: Claim
    models: Claim
    cache: Space = Space(size_limit="50Gi")
    shm: Space = Space(size_limit="2Gi")
    grace: int = 60
    user: int = 10001
    priority_class: str = ""
    queue: str = ""
    claim_template: str = ""
    roles: Roles = Roles()

    def image(self, role: str) -> str:
        """The role's image."""
        images = {
            "rollout": self.images.rollout,
            "sync": self.images.sync,
            "colocated": self.images.colocated,
        }
        return images.get(role, self.images.trainer)

    def text(self) -> str:
        """The plan as a job's ConfigMap keeps it: whole, in one order."""
        return msgspec.json.encode(self, order="sorted").decode()


def read(text: str) -> PodPlan:
    """The plan in `text`, YAML or JSON. Raises `ValueError` naming the key that is wrong."""
    try:
        plan = msgspec.yaml.decode(text, type=PodPlan)
    except msgspec.MsgspecError as error:
        raise ValueError(f"launcher.yaml: {error}") from None
    if "SYNCLINE_REDIS_URL" not in plan.secret_env:
        raise ValueError(
            "launcher.yaml: secretEnv.SYNCLINE_REDIS_URL names no secret: pods would find no Redis"
        )
    if both := sorted(plan.env.keys() & plan.secret_env.keys()):
        raise ValueError(f"launcher.yaml: {', '.join(both)} is in env and in secretEnv")
    for name in ROLES:
        role = plan.roles.of(name)
        if role.gpus < 0:
            raise ValueError(f"launcher.yaml: roles.{name}.gpus is {role.gpus}: a whole number from 0")
        if unknown := sorted(role.resources.keys() - {"requests", "limits"}):
            raise ValueError(
                f"launcher.yaml: roles.{name}.resources.{unknown[0]}: only requests and limits are known"
            )
        if role.gpu_resource in role.resources.get("limits", {}):
            raise ValueError(
                f"launcher.yaml: roles.{name}.resources.limits: GPUs are said by roles.{name}.gpus"
            )
    if plan.grace < 10:
        raise ValueError(
            f"launcher.yaml: grace {plan.grace}: processes need 10 s to hand back what they hold"
        )
    return plan
