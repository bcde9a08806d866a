"""Replay of recorded expert ids in plain models: exact routes, the family's own weights, gradients to the router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.forge import family_folder, plain
from torch import Tensor, nn

from syncline.numerics.route_agreement import route_agreement
from syncline.reference.routes import (
    CannotReplay,
    RecordedRoutes,
    Routing,
    check_replayable,
    replaying,
    routers,
)

SHIPPED = ("tiny-moe", "tiny-glm", "tiny-kimi", "tiny-hybrid")
ROUTED = (*SHIPPED, "gpt-oss", "deepseek-v3")  # deepseek-v3: experts in two groups, one of which is chosen


@pytest.fixture(params=ROUTED)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Weights random by a seed, BF16-valued; gradients are gone afterwards, since others share the model."""
    found = plain(family_folder(request.param, tmp_path), 0)
    yield found
    found.zero_grad(set_to_none=True)


def batch() -> tuple[Tensor, Tensor]:
    """Ids [3, 12] and their mask: one row has pads."""
    ids_BT = torch.randint(3, 100, (3, 12), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.ones_like(ids_BT)
    ids_BT[1, 7:], mask_BT[1, 7:] = 0, 0
    return ids_BT, mask_BT


def forward(model: Any) -> Tensor:
    """Logits [3, 12, V]."""
    ids_BT, mask_BT = batch()
    logits: Tensor = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
    return logits


@contextmanager
def watching(model: Any) -> Iterator[list[tuple[Tensor, Tensor, Tensor]]]:
    """What each router returned: logits [N, E], weights [N, K], ids [N, K]. By hooks of this file's own."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    modules = [m for m in model.modules() if type(m).__name__.endswith("outer")]
    hooks = [m.register_forward_hook(lambda module, args, out: seen.append(out)) for m in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def ids_seen(seen: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """[N, L, K]."""
    return torch.stack([ids for _, _, ids in seen], dim=1)


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Of an arbitrary, uneven sum of the log-probs."""
    model.zero_grad(set_to_none=True)
    logprobs = logits.float().log_softmax(-1)
    (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).mean().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_replaying_a_model_s_own_routes_changes_no_bit(model: Any) -> None:
    with watching(model) as seen:
        free = forward(model)
    expected = gradients(model, free)
    ids_NLK = ids_seen(seen)
    with replaying(model, ids_NLK) as chosen:
        replayed = forward(model)
    assert torch.equal(replayed, free)
    assert torch.equal(torch.stack(chosen, 1), ids_NLK)
    found = gradients(model, replayed)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert torch.equal(forward(model), free), "afterwards the model routes freely, as before"


def test_foreign_routes_are_taken_exactly_and_weighed_by_the_family_s_rule(model: Any) -> None:
    with watching(model) as seen:
        free = forward(model)
    experts = Routing.of(model).experts
    foreign_NLK = (ids_seen(seen) + 1) % experts
    with watching(model) as seen, replaying(model, foreign_NLK) as chosen:
        replayed = forward(model)
    assert torch.equal(ids_seen(seen), foreign_NLK)
    assert float((replayed - free).detach().abs().max()) > 1e-2
    assert torch.equal(chosen[0], (foreign_NLK[:, 0] - 1) % experts), (
        "nothing is replayed below the first router"
    )
    for router, (logits_NE, weights_NK, ids_NK) in zip(routers(model).values(), seen, strict=True):
        assert torch.allclose(
            weights_NK, rule(router, logits_NE).gather(1, ids_NK) / norm(router, logits_NE, ids_NK)
        )


def rule(router: Any, logits_NE: Tensor) -> Tensor:
    """Weights before normalisation, as each family's paper has them."""
    name = type(router).__name__
    if name.startswith(("Qwen", "GptOss")):
        return logits_NE.softmax(-1)
    assert name in ("GlmMoeDsaTopkRouter", "KimiLinearTopkRouter", "DeepseekV3TopkRouter")
    scaled: Tensor = logits_NE.sigmoid() * router.routed_scaling_factor
    return scaled


def norm(router: Any, logits_NE: Tensor, ids_NK: Tensor) -> Tensor | float:
    """What they are divided by, [N, 1]. gpt-oss: softmax over the chosen alone, which is the same."""
    name = type(router).__name__
    scale = 1.0 if name.startswith(("Qwen", "GptOss")) else router.routed_scaling_factor
    if not name.startswith(("Qwen3_5", "GptOss")) and not router.norm_topk_prob:
        return 1.0
    return rule(router, logits_NE).gather(1, ids_NK).sum(-1, keepdim=True) / scale


def test_gradients_reach_the_router_and_the_prescribed_experts_alone(model: Any) -> None:
    tokens, routing = batch()[0].numel(), Routing.of(model)
    ids_NLK = torch.arange(routing.topk).repeat(tokens, routing.layers, 1) + routing.experts - routing.topk
    with replaying(model, ids_NLK):
        found = gradients(model, forward(model))
    for name in routers(model):
        assert float(found[f"{name}.weight"].abs().max()) > 0
    stacked = [g for name, g in found.items() if ".experts." in name and g.shape[0] == routing.experts]
    assert len(stacked) >= 2 * routing.layers
    for gradient in stacked:
        moved = gradient.flatten(1).abs().amax(1) > 0
        assert moved.tolist() == [False] * (routing.experts - routing.topk) + [True] * routing.topk


def test_the_bias_of_the_choice_has_no_part_in_a_replayed_weight(tmp_path: Path) -> None:
    found = plain(family_folder("tiny-glm", tmp_path), 0)
    with watching(found) as seen:
        forward(found)
    ids_NLK = ids_seen(seen)
    biases = [b for name, b in found.named_buffers() if name.endswith("e_score_correction_bias")]
    with replaying(found, ids_NLK):
        before = forward(found)
    try:
        for bias in biases:
            bias.copy_(torch.linspace(5, -5, len(bias)))
        with replaying(found, ids_NLK) as chosen:
            after = forward(found)
    finally:
        for bias in biases:
            bias.zero_()
    assert biases
    assert torch.equal(before, after)
    assert not torch.equal(torch.stack(chosen, 1), ids_NLK), "the free choice does see the bias"


@pytest.mark.parametrize("family", SHIPPED)
def test_routes_of_quantised_weights_are_followed_to_the_last_token(family: str, tmp_path: Path) -> None:
    trainer = plain(family_folder(family, tmp_path), 0)
    rollout = quantised(family_folder(family, tmp_path))
    with torch.no_grad(), watching(rollout) as seen:
        behaviour = forward(rollout).log_softmax(-1)
    recorded = ids_seen(seen)
    with torch.no_grad(), watching(trainer) as seen:
        free = forward(trainer).log_softmax(-1)
    without = route_agreement(ids_seen(seen), recorded)
    with torch.no_grad(), watching(trainer) as seen, replaying(trainer, recorded):
        replayed = forward(trainer).log_softmax(-1)
    assert route_agreement(ids_seen(seen), recorded).tolist() == [1.0] * len(without)
    assert float(without.min()) < 0.95
    assert float((replayed - behaviour).abs().mean()) < float((free - behaviour).abs().mean())


def quantised(folder: Path) -> Any:
    """The same model with each matrix rounded to 15 levels per row."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.load_state_dict(plain(folder, 0).state_dict())
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2 and "gate.weight" not in name and "embed" not in name:
                step = p.abs().amax(-1, keepdim=True) / 7
                p.copy_((p / step).round() * step)
    return model.eval()


# ---- what cannot be replayed --------------------------------------------------------------------------------
class ArgsortRouter(nn.Module):
    """Chooses its experts by sorting, which replay cannot answer for it."""

    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_NE = hidden_ND @ self.weight.T
        ids_NK = logits_NE.argsort(-1, descending=True)[:, :2]
        return logits_NE, logits_NE.gather(1, ids_NK), ids_NK


def test_a_router_that_takes_no_prescription_is_refused_by_name() -> None:
    model = nn.ModuleDict({"gate": ArgsortRouter()})
    with pytest.raises(CannotReplay, match=r"router gate \(ArgsortRouter\)"):
        check_replayable(model)


def test_a_model_that_does_not_route_is_refused_by_name(tmp_path: Path) -> None:
    dense = plain(family_folder("tiny-dense", tmp_path), 0)
    for attempt in (
        lambda: check_replayable(dense),
        lambda: replaying(dense, torch.zeros(1, 1, 1)).__enter__(),
    ):
        with pytest.raises(CannotReplay, match="Qwen3ForCausalLM does not route"):
            attempt()


@pytest.mark.parametrize(
    ("ids", "what"),
    [
        (
            torch.tensor([[0, 1]]).repeat(36, 3, 1),
            r"shape \[36, 3, 2\], the model routes in 2 layers to 2 experts",
        ),
        (torch.tensor([[0, 4]]).repeat(36, 2, 1), "expert 4, the model has experts 0 to 3"),
        (torch.tensor([[3, 3]]).repeat(36, 2, 1), "token 0 goes to one expert twice in routing layer 0"),
        (torch.tensor([[0, 1]]).repeat(35, 2, 1), "router model.layers.0.mlp.gate .* for 35 tokens"),
    ],
    ids=["layers", "expert", "twice", "tokens"],
)
def test_ids_that_do_not_fit_are_refused(tmp_path: Path, ids: Tensor, what: str) -> None:
    found = plain(family_folder("tiny-moe", tmp_path), 0)
    with pytest.raises(CannotReplay, match=what), replaying(found, ids):
        forward(found)
    assert "forward" not in vars(found.model.layers[0].mlp.gate), "the router is its own again"


def test_a_pass_that_does_not_happen_or_happens_twice_is_no_replay(tmp_path: Path) -> None:
    found = plain(family_folder("tiny-moe", tmp_path), 0)
    ids_NLK = torch.tensor([[0, 1]]).repeat(36, 2, 1)
    with pytest.raises(RuntimeError, match="ran in the order"), replaying(found, ids_NLK):
        pass
    with pytest.raises(RuntimeError, match="ran in the order"), replaying(found, ids_NLK):
        [forward(found) for _ in range(2)]


@pytest.mark.parametrize(("dtype", "size"), [("u1", 1), ("u2", 2)])
def test_recorded_bytes_are_read_as_they_were_written(dtype: Any, size: int) -> None:
    numbers = range(1, 1 + 3 * 2 * 2)
    data = b"".join(((n * 97) % 256**size).to_bytes(size, "little") for n in numbers)
    found = RecordedRoutes(data, (3, 2, 2), dtype).ids()
    assert found.shape == (3, 2, 2)
    assert found.flatten().tolist() == [(n * 97) % 256**size for n in numbers]
