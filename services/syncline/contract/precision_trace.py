"""The six-component trace: which representation each component really used, with its bytes (seed Table 3).

Filled in from running modules and from bytes that were written, never from the contract: a module that was not
swapped shows here as what it is. One record per update; the rollout and convert parts are those of the version that
the update started from.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Component = Literal["rollout", "fprop", "dgrad", "wgrad", "optimizer", "convert"]
COMPONENTS: tuple[Component, ...] = ("rollout", "fprop", "dgrad", "wgrad", "optimizer", "convert")
Held = Literal[
    "codes",
    "scales",
    "wide",
    "reconstructed",
    "transposed",
    "workspace",
    "saved_activations",
    "master",
    "moments",
    "gradients",
    "kv_cache",
    "adapter",
    "gathered",
    "artefact",
]
"""What bytes are for. `reconstructed`: dequantised copies that live between calls; `transposed`: codes quantised along
another contraction; `workspace`: the largest temporary of one call; `gathered`: what data-parallel ranks would
exchange per update; `artefact`: what sync put into the store; `kv_cache`: the context of one token of a request."""


class Use(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one component made of one family. `family` empty: everything that no family names; "kv_cache": the
    context of requests, where it is stored quantised.

    tensors      weights it was seen on
    encoded      codes and scales, such as "E4M3, FP32 scale per 128x128"; "bf16 values" for wide
    operands     what the GEMM read, such as "X codes 1x128, W codes 128x128" or "X original, W reconstructed"
    kernel       what multiplied: "wide fp32", "emulated codes, fp32 partial sums", "scaled_mm", "none"
    accumulate, persistent, communicated   dtypes or representations
    """

    family: str
    tensors: int
    encoded: str
    operands: str
    kernel: str
    accumulate: str = "fp32"
    persistent: str
    communicated: str = ""


class ComponentTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One component. `bytes` by what they are for; a kind that is absent was not held.

    place   of `convert`: where low-bit tensors were made (`precision.Place`)
    """

    component: Component
    uses: tuple[Use, ...]
    bytes: dict[Held, int] = {}
    place: str = ""
