"""`PrecisionContract`: the one declaration of numerics that every component is compiled from.

Six components execute or move a policy: rollout, trainer FProp, DGrad, WGrad, optimizer, convert-and-synchronize.
For each of them and each operator family the contract states five decisions: encoded values and scales, GEMM
operands, accumulation and output, persistent representation, communication representation. A family is a set of
linear weights, named by pattern, that are treated alike; every tensor that no family names is wide. `plan.resolve`
turns patterns into one entry per tensor, and everything downstream reads that plan.

Contracts are written as TOML (`recipes/`), with schemes by name; what is hashed holds the schemes themselves.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from syncline.contract.schemes import KvFormat, Scheme

Operand = Literal["original", "reconstructed", "requantised", "codes"]
"""What a GEMM reads of a tensor. `original`: the wide values. `reconstructed`: the values that FProp's codes stand
for, in a wide GEMM. `requantised`: quantised anew along this GEMM's own contraction, dequantised, in a wide GEMM.
`codes`: codes and scales (quantised along this GEMM's contraction), in a low-precision kernel."""
Wide = Literal["bf16", "fp32"]
Place = Literal["sync", "trainer_rank", "rollout_worker"]
"""Where low-bit tensors are made: by sync, by the trainer as it exports, by the worker's engine as it loads."""
Hardware = Literal["cpu", "ampere", "ada", "hopper", "blackwell"]
"""What engines run on; GPUs by generation, for that decides which low-precision paths exist."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Gemm(_Part, frozen=True, kw_only=True):
    """Operands of one of a linear layer's three GEMMs (seed section 3.2).

    left    X in FProp, the upstream gradient G_Y in DGrad and WGrad
    right   W in FProp and DGrad, X in WGrad
    """

    left: Operand = "original"
    right: Operand = "original"


class Family(_Part, frozen=True, kw_only=True):
    """Linear weights that are stored and multiplied alike.

    match       patterns (fnmatch, `*` crosses dots) over checkpoint tensor names; one that matches nothing is an error
    keep        exceptions that stay wide: patterns among what `match` names; one that keeps nothing is an error
    weight      scheme of the stored codes and scales
    activation  scheme of the rollout GEMM's activation operand; None: weight-only, activations stay wide
    fuse        last module names whose weights share one outer scale (nvfp4), such as gate_proj with up_proj
    sensitive   also quantise what stays wide by default: routers, embeddings, output head
    """

    name: str
    match: tuple[str, ...]
    keep: tuple[str, ...] = ()
    weight: Scheme
    activation: Scheme | None = None
    fuse: tuple[tuple[str, ...], ...] = ()
    sensitive: bool = False


class Rollout(_Part, frozen=True, kw_only=True):
    """What the rollout engine holds and executes.

    wide       values of every tensor that no family names
    kernel     dequantised: codes are decoded and multiplied in a wide GEMM; codes: a kernel that consumes codes and
               scales, with FP32 partial sums per block (on CPU emulated, and named so)
    kv_cache   how attention state is stored, apart from the weights
    """

    wide: Wide = "bf16"
    kernel: Literal["dequantised", "codes"] = "dequantised"
    kv_cache: KvFormat = "wide"


class Trainer(_Part, frozen=True, kw_only=True):
    """What the trainer holds, reads and exchanges. The three GEMMs are those of the quantised families.

    parameters   values of the persistent parameters that FProp reads
    operands     dtype in which dequantised operands are held (rounding them to BF16 keeps half of the FP8 gap)
    gather       what data-parallel ranks exchange of eligible parameters; independent of the GEMMs (seed 4.1.2)
    master       dtype of the optimizer's source of truth, and of its moments
    adam_offload Megatron's Adam on the CPU; contradicts an FP8 gather
    """

    parameters: Wide = "bf16"
    fprop: Gemm = Gemm()
    dgrad: Gemm = Gemm()
    wgrad: Gemm = Gemm()
    operands: Wide = "fp32"
    gather: Literal["bf16", "fp32", "fp8_block"] = "bf16"
    master: Literal["fp32"] = "fp32"
    moments: Literal["fp32"] = "fp32"
    adam_offload: bool = False


class Convert(_Part, frozen=True, kw_only=True):
    """How an update becomes the rollout representation.

    route       artefact: the export is quantised into checkpoint tensors; bf16_bridge: BF16 tensors travel and the
                engine quantises them as it loads
    place       where the quantisers run; None: where the route says (artefact: sync, bf16_bridge: rollout_worker).
                A trainer that quantises exports what sync would have made, byte for byte
    tolerance   largest |trainer - rollout| canary log-prob difference at one version, the trainer scoring as rollout
    """

    route: Literal["artefact", "bf16_bridge"] = "artefact"
    place: Place | None = None
    tolerance: float = 1e-3

    @property
    def where(self) -> Place:
        """`place`, or what the route says."""
        return self.place or ("sync" if self.route == "artefact" else "rollout_worker")


class Adapter(_Part, frozen=True, kw_only=True):
    """LoRA: y = base(x) + (alpha / rank) x A^T B^T. With it the base is frozen and never moves.

    targets      patterns over checkpoint names of the linear weights that get an adapter
    rank_stable  scale alpha / sqrt(rank) (rsLoRA)
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rank_stable: bool = False

    def scale(self) -> float:
        """Factor of the adapter's product."""
        return self.alpha / (self.rank**0.5 if self.rank_stable else self.rank)


class Expectation(_Part, frozen=True, kw_only=True):
    """Where the same-version mean |log-prob difference| of a trained policy is expected; None: not stated."""

    low: float = 0.0
    high: float | None = None


class PrecisionContract(_Part, frozen=True, kw_only=True):
    """See the module. `compute`: arithmetic of wide GEMMs (BF16-valued tensors multiplied in FP32 on CPU).

    max_lag, in_flight   limits that the recipe puts on the job's schedule; None: the job decides
    """

    name: str
    about: str = ""
    families: tuple[Family, ...] = ()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    convert: Convert = Convert()
    adapter: Adapter | None = None
    compute: Wide = "fp32"
    accumulate: Literal["fp32"] = "fp32"
    expected: Expectation = Expectation()
    max_lag: int | None = None
    in_flight: Literal["drain", "continue_old", "in_place"] | None = None

    def digest(self) -> str:
        """sha256 hex of the canonical JSON form. `about` is prose and not covered."""
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, about=""))).hexdigest()

    @property
    def representation(self) -> str:
        """Name of what rollout holds: the formats in use, else the wide dtype; `+lora` with an adapter."""
        formats = sorted({family.weight.format for family in self.families})
        return "+".join(formats or [self.rollout.wide]) + ("+lora" if self.adapter else "")


Variant = Literal["contract", "plain", "forward_qdq", "qdq", "real"]
"""The trainer variants of the seed's Table 5. `contract`: whatever the contract itself says."""


def with_variant(contract: PrecisionContract, variant: Variant) -> PrecisionContract:
    """`contract` with its trainer GEMMs exchanged for a variant of Table 5; rollout stays what it is.

    Weight-only formats have no activation scheme: X and G_Y stay original there, and so does WGrad. Under an adapter
    the base is frozen and has no WGrad.
    """
    if variant == "contract":
        return contract
    whole = all(family.activation is not None for family in contract.families)
    match variant:
        case "plain":
            fprop = dgrad = wgrad = Gemm()
        case "forward_qdq":
            fprop = Gemm(left="reconstructed" if whole else "original", right="reconstructed")
            dgrad = wgrad = Gemm()
        case "qdq" if whole:
            fprop = Gemm(left="reconstructed", right="reconstructed")
            dgrad = wgrad = Gemm(left="requantised", right="requantised")
        case "qdq":
            fprop, dgrad, wgrad = Gemm(right="reconstructed"), Gemm(right="reconstructed"), Gemm()
        case "real" if whole:
            fprop = dgrad = wgrad = Gemm(left="codes", right="codes")
        case "real":
            fprop, dgrad, wgrad = Gemm(right="codes"), Gemm(right="reconstructed"), Gemm()
    if contract.adapter is not None:
        wgrad = Gemm()
    trainer = msgspec.structs.replace(contract.trainer, fprop=fprop, dgrad=dgrad, wgrad=wgrad)
    return msgspec.structs.replace(contract, trainer=trainer)
