"""The same-version gap of a trained policy: its size where precision differs, and nothing where it does not.

512 prompts, sampled by the format's rollout with its KV cache, scored by the trainer's full forward, same weights. The
policies (`policies/*/made.json`) are in the middle of their training: entropy about 1. Bands: what the formats cost a
tiny policy. A gap of zero where they differ would mean that quantisation is not applied.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from gap_pairs import (
    BANDS,
    MATCHED,
    POLICIES,
    PROMPTS,
    Measured,
    architectures,
    contract_of,
    formats,
    measured_of,
    spec_of,
)

from syncline.lab.measure import behaviour, gap
from syncline.lab.pair import Pair, one_thread
from syncline.lab.task import Architecture


@lru_cache(maxsize=64)
def measured(
    architecture: Architecture, name: str, variant: str, operands: Literal["fp32", "bf16"] = "fp32"
) -> Measured:
    contract = contract_of(name)
    trainer = msgspec.structs.replace(contract.trainer, operands=operands)
    return measured_of(architecture, msgspec.structs.replace(contract, trainer=trainer), variant)


@architectures
def test_the_policy_is_in_the_middle_of_its_training(architecture: Architecture) -> None:
    found = measured(architecture, "bf16", "contract")
    surprise = -sum(sum(r.logprobs) for r in found.records) / found.gap.tokens
    assert 0.9 < surprise < 1.25, "mean -log p of its own tokens estimates its entropy"
    assert 0.3 < found.reward < 0.55


@architectures
def test_unquantised_engines_agree_to_the_last_bits(architecture: Architecture) -> None:
    found = measured(architecture, "bf16", "contract")
    assert found.gap.p99 <= 1e-5
    assert found.gap.max < 1e-4
    assert found.routes == () if architecture == "dense" else min(found.routes) >= 0.999


@formats
@architectures
def test_a_bf16_trainer_is_as_far_from_rollout_as_the_format_says(
    architecture: Architecture, name: str
) -> None:
    found = measured(architecture, name, "plain")
    low, high = BANDS[name]
    assert low <= found.gap.mean <= high
    assert found.gap.p99 > 5 * found.gap.mean, "the tail is long"
    assert found.gap.exact < 0.01
    if architecture == "moe":
        assert max(found.routes) < 0.999, "some tokens reach other experts"


@architectures
def test_fewer_bits_are_further(architecture: Architecture) -> None:
    fp8, int4, w4a4 = (
        measured(architecture, name, "plain").gap.mean
        for name in ("unified_fp8", "int4_qat_w4a16", "nvfp4_w4a4")
    )
    assert 2 * fp8 < int4 < w4a4


@formats
@architectures
def test_a_matched_forward_is_the_rollouts(architecture: Architecture, name: str) -> None:
    found = measured(architecture, name, MATCHED[name])
    assert found.gap.mean <= 1e-4
    assert found.gap.p99 <= 1e-5
    assert found.gap.mean < measured(architecture, name, "plain").gap.mean / 100
    if architecture == "moe":
        assert min(found.routes) >= 0.999


@pytest.mark.parametrize("variant", ["forward_qdq", "qdq", "real"])
@formats
def test_every_quantised_forward_agrees_far_better(name: str, variant: str) -> None:
    """Also where fake and real differ: values held in FP32 against a kernel on codes and scales."""
    found, plain = measured("dense", name, variant), measured("dense", name, "plain")
    assert found.gap.mean < plain.gap.mean / 100
    assert found.gap.kl < plain.gap.kl / 100


@architectures
def test_operands_rounded_to_bf16_keep_about_half_of_the_fp8_gap(architecture: Architecture) -> None:
    """FP32 scales leave values that BF16 cannot hold, and the next layer's activation codes amplify one ulp."""
    plain = measured(architecture, "unified_fp8", "plain").gap.mean
    assert measured(architecture, "unified_fp8", "qdq", "fp32").gap.mean < plain / 100
    assert 0.25 < measured(architecture, "unified_fp8", "qdq", "bf16").gap.mean / plain < 0.75


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4_qat_w4a16"])
def test_power_of_two_scales_lose_nothing_in_bf16_operands(name: str) -> None:
    wide, rounded = (measured("dense", name, "qdq", operands).gap.mean for operands in ("fp32", "bf16"))
    assert rounded == wide, "such values are BF16 numbers"


@pytest.mark.parametrize("name", ["unified_fp8", "int4_qat_w4a16", "nvfp4_w4a4"])
@architectures
def test_one_scoring_path_twice_is_exactly_equal(
    architecture: Architecture, name: str, tmp_path: Path
) -> None:
    one_thread()
    pair = Pair(spec_of(architecture, contract_of(name), "qdq"), POLICIES, tmp_path)
    pair.publish()
    records = pair.sample(PROMPTS)
    scored, few = pair.score_trainer(records), records[:64]
    assert gap(pair.score_trainer(records), scored).max == 0
    assert gap(pair.score_rollout(few), pair.score_rollout(few)).max == 0
    again = pair.sample(PROMPTS)
    assert gap(behaviour(again), behaviour(records)).max == 0
