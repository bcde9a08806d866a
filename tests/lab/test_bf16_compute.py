"""A contract that computes in BF16: the two engines' numbers are the same numbers, not only near."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import msgspec
import pytest
from gap_pairs import BANDS, MATCHED, POLICIES, Measured, architectures, contract_of, measured_of, spec_of

from syncline.contract.job import PrecisionSpec
from syncline.contract.recipes import RECIPES
from syncline.lab.measure import behaviour, gap
from syncline.lab.pair import Pair, one_thread
from syncline.lab.task import Architecture
from syncline.rollout.engine import Chunk, Request, Sampling


@lru_cache(maxsize=32)
def measured(architecture: Architecture, name: str, variant: str) -> Measured:
    contract = msgspec.structs.replace(contract_of(name), compute="bf16")
    return measured_of(architecture, contract, variant)


@pytest.mark.parametrize("name", ["bf16", *BANDS])
@architectures
def test_a_matched_forward_gives_the_very_same_numbers(architecture: Architecture, name: str) -> None:
    found = measured(architecture, name, MATCHED.get(name, "contract"))
    assert found.gap.exact >= 0.99
    assert found.gap.p99 == 0
    assert found.gap.mean <= 1e-4
    if architecture == "moe":
        assert min(found.routes) >= 0.999


@pytest.mark.parametrize("name", ["unified_fp8", "int4_qat_w4a16", "nvfp4_w4a4"])
def test_the_unmatched_gap_is_that_of_fp32(name: str) -> None:
    """What the format costs is far more than what BF16 adds."""
    low, high = BANDS[name]
    assert low <= measured("dense", name, "plain").gap.mean <= high


def test_requests_of_unequal_lengths_share_a_batch(tmp_path: Path) -> None:
    """Plain attention adds its mask; one that was made for the fused kernel would be wrong without a word."""
    one_thread()
    contract = msgspec.structs.replace(RECIPES["bf16"], compute="bf16")
    pair = Pair(spec_of("dense", contract, "contract"), POLICIES, tmp_path)
    pair.publish()
    sampling = Sampling(max_tokens=12, min_tokens=12)
    prompts = {f"t{n}": (1, *(4 + (n * i) % 10 for i in range(n))) for n in (3, 9, 17, 5, 11)}

    def sampled(names: Iterable[str]) -> dict[str, Chunk]:
        for name in names:
            pair.rollout.submit(
                Request(trajectory=name, prompt=prompts[name], seed=(len(prompts[name]),), sampling=sampling)
            )
        found: dict[str, Chunk] = {}
        while pair.rollout.running:
            found |= {chunk.trajectory: chunk for chunk in pair.rollout.step()}
        return found

    together = sampled(prompts)
    for name, prompt in prompts.items():
        assert together[name].tokens == sampled([name])[name].tokens
        whole = (*prompt, *together[name].tokens)
        scored = pair.rollout.score(whole, len(prompt), buffer="active").logprobs
        assert gap([scored], [together[name].logprobs]).max < 0.05


def test_training_goes_on_in_fp32_masters(tmp_path: Path) -> None:
    one_thread()
    norms = []
    for compute in ("fp32", "bf16"):
        contract = msgspec.structs.replace(RECIPES["int4_qat_w4a16"], compute=compute)
        spec = spec_of("moe", contract, "contract", groups=8, group_size=8)
        pair = Pair(spec, POLICIES, tmp_path / compute)
        pair.publish()
        records = pair.sample(range(8), 8)
        result = pair.train(records, pair.rewards(records)).result
        assert not result.skipped
        assert result.grad_norm is not None
        norms.append(result.grad_norm)
        kinds = {
            use.kernel
            for part in result.trace
            if part.component == "fprop"
            for use in part.uses
            if not use.family
        }
        assert kinds == {f"wide {compute}"}, "as the trace reads it from the model"
        before = gap(pair.score_trainer(records), behaviour(records)).mean
        pair.publish()
        assert gap(pair.score_trainer(records), pair.score_rollout(records)).mean < 1e-4 < before
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


def test_it_needs_bf16_values(tmp_path: Path) -> None:
    contract = msgspec.structs.replace(RECIPES["fp32"], compute="bf16")
    spec = spec_of("dense", contract, "contract")
    assert isinstance(spec.precision, PrecisionSpec)
    with pytest.raises(ValueError, match=r"compute 'bf16' needs trainer\.parameters"):
        Pair(spec, POLICIES, tmp_path)
