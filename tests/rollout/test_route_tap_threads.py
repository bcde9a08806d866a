"""Two threads run forward passes of one model: each catches its own expert ids, or none, and never the other's."""

from __future__ import annotations

import threading

import torch
from conformance.forge import MODELS

from syncline.contract.job import ModelSpec
from syncline.reference.model import load_model
from syncline.reference.routes import RouteTap, routers


def test_a_pass_in_another_thread_does_not_end_what_this_one_catches() -> None:
    model = load_model(MODELS, ModelSpec(name="tiny-moe"), 0).model
    tap = RouteTap(model)
    half_way, other_done = threading.Event(), threading.Event()
    ids = torch.arange(3, 9)[None]

    def wait_once(*_: object) -> None:
        if threading.current_thread() is threading.main_thread() and not half_way.is_set():
            half_way.set()
            assert other_done.wait(30)

    def other() -> None:
        assert half_way.wait(30)
        with torch.no_grad(), tap.catching(False) as nothing:
            model(input_ids=ids, use_cache=False)
        assert nothing == []
        other_done.set()

    list(routers(model).values())[-1].register_forward_pre_hook(wait_once)
    thread = threading.Thread(target=other)
    thread.start()
    with torch.no_grad(), tap.catching(True) as caught:
        model(input_ids=ids, use_cache=False)
    thread.join(30)
    assert tap.stacked(caught).shape == (6, tap.layers, tap.topk)
