"""Makes the files beside it: what each rank of a real Megatron holds of a tiny model, under several layouts.

Run in an environment of its own, with megatron-core 0.16.1, torch, psutil and safetensors, on CPU:

    TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 python make_golden_shards.py [moe | dense | mla] ...

A model on one rank gets values that number every element, and Megatron's own distributed checkpoint is written from it;
then Megatron loads that checkpoint under each layout. So which rank holds which rows is said by Megatron alone. The one
mapping made here is that of one rank to checkpoint names (`full.safetensors`), in which nothing is cut.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HIDDEN, HEADS, GROUPS, WIDTH, FFN, EXPERTS, VOCAB, PADDED, LAYERS = 8, 4, 2, 4, 8, 4, 37, 40, 2
MODELS: dict[str, dict[str, Any]] = {
    "moe": {"experts": True},
    "dense": {"bias": True, "tied": True},
    "mla": {"experts": True, "latent": True},
}
LAYOUTS: list[dict[str, Any]] = [
    {"model": "moe", "tp": 2, "pp": 1, "ep": 1, "etp": 2, "dp": 1},
    {"model": "moe", "tp": 1, "pp": 2, "ep": 2, "etp": 1, "dp": 2},
    {"model": "moe", "tp": 2, "pp": 2, "ep": 2, "etp": 1, "dp": 1},
    {"model": "moe", "tp": 2, "pp": 1, "ep": 2, "etp": 2, "dp": 2},
    {"model": "moe", "tp": 4, "pp": 1, "ep": 4, "etp": 1, "dp": 1},
    {"model": "dense", "tp": 2, "pp": 2, "ep": 1, "etp": 2, "dp": 1},
    {"model": "dense", "tp": 4, "pp": 1, "ep": 1, "etp": 4, "dp": 1},
    {"model": "mla", "tp": 2, "pp": 1, "ep": 1, "etp": 2, "dp": 1},
]


def shims() -> None:
    """Megatron asks for CUDA in a few places that a load on CPU passes."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import torch
    from megatron.core.transformer import multi_latent_attention

    class Stream:
        def wait_stream(self, *_: Any) -> None: ...
        def wait_event(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...
        def record_event(self, *_: Any) -> None: ...

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *a, **k: self
    torch.cuda.synchronize = lambda *a, **k: None
    torch.cuda.Stream = torch.cuda.Event = lambda *a, **k: Stream()
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *a, **k: Stream()
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False


def built(kind: dict[str, Any], layout: dict[str, Any]) -> Any:
    """This rank's part of a model."""
    import torch
    import torch.nn.functional as functional
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    class Norm(torch.nn.RMSNorm):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
            super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
            self.weight.sequence_parallel = config.sequence_parallel

    class LatentAttention(DotProductAttention):
        def __init__(self, *a: Any, k_channels: Any = None, v_channels: Any = None, **k: Any) -> None:
            super().__init__(*a, **k)

    moe, latent = bool(kind.get("experts")), bool(kind.get("latent"))
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": bool(kind.get("bias")),
        "qk_layernorm": moe,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": layout["tp"],
        "pipeline_model_parallel_size": layout["pp"],
        "expert_model_parallel_size": layout["ep"],
        "expert_tensor_parallel_size": layout["etp"],
        "sequence_parallel": layout["tp"] > 1,
    }
    if moe:
        settings |= {
            "num_moe_experts": EXPERTS,
            "moe_ffn_hidden_size": FFN,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    if latent:
        settings |= {
            "multi_latent_attention": True,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_head_dim": 4,
            "qk_pos_emb_head_dim": 2,
            "v_head_dim": 6,
            "rope_type": "rope",
        }
        config = MLATransformerConfig(**settings)
    else:
        config = TransformerConfig(num_query_groups=GROUPS, kv_channels=WIDTH, **settings)
    spec = get_gpt_layer_local_spec(
        num_experts=EXPERTS if moe else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=latent,
        normalization="RMSNorm",
    )
    inner, attention = spec.submodules, spec.submodules.self_attention.submodules
    inner.input_layernorm = inner.pre_mlp_layernorm = Norm
    if latent:
        attention.core_attention = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = Norm
    elif moe:
        attention.q_layernorm = attention.k_layernorm = Norm
    block = TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=Norm)
    return GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=PADDED,
        max_sequence_length=16,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(kind.get("tied")),
        position_embedding_type="rope",
    )


def numbered(model: Any) -> dict[str, Any]:
    """Give every element of the one-rank model a number of its own; the model as checkpoint tensors."""
    import torch

    full: dict[str, Any] = {}
    at = 1
    for name, parameter in model.named_parameters():
        values = torch.arange(at, at + parameter.numel(), dtype=torch.float32).view(parameter.shape)
        at += parameter.numel()
        if parameter.shape[0] == PADDED:
            values[VOCAB:] = 0
        parameter.data.copy_(values)
        full |= checkpoint(name, values)
    return full


def checkpoint(name: str, w: Any) -> dict[str, Any]:
    """A parameter of the one-rank model under its checkpoint names."""
    ends = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if name in ends:
        return {ends[name]: w[:VOCAB] if w.shape[0] == PADDED else w}
    _, _, layer, rest = name.split(".", 3)
    rest = rest.replace("pre_mlp_layernorm", "post_attention_layernorm")
    for megatron, hf in (
        ("self_attention.linear_proj", "self_attn.o_proj"),
        ("self_attention.linear_q_down_proj", "self_attn.q_a_proj"),
        ("self_attention.linear_q_up_proj", "self_attn.q_b_proj"),
        ("self_attention.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa"),
        ("self_attention.linear_kv_up_proj", "self_attn.kv_b_proj"),
        ("self_attention.kv_layernorm", "self_attn.kv_a_layernorm"),
        ("self_attention.k_layernorm", "self_attn.k_norm"),
        ("mlp.router", "mlp.gate"),
        ("mlp.experts.local_experts", "mlp.experts"),
        ("linear_fc2", "down_proj"),
    ):
        rest = rest.replace(megatron, hf)
    latent_q = w.ndim == 1 and w.shape[0] == 12
    rest = rest.replace(
        "self_attention.q_layernorm", "self_attn.q_a_layernorm" if latent_q else "self_attn.q_norm"
    )
    prefix = f"model.layers.{layer}."
    if "linear_qkv" in rest:
        leaf = rest.rsplit(".", 1)[-1]
        grouped = w.view(GROUPS, HEADS // GROUPS + 2, WIDTH, *w.shape[1:])
        parts = grouped[:, : HEADS // GROUPS], grouped[:, -2], grouped[:, -1]
        return {
            f"{prefix}self_attn.{x}_proj.{leaf}": part.reshape(-1, *w.shape[1:]).clone()
            for x, part in zip("qkv", parts, strict=True)
        }
    if "linear_fc1" in rest:
        gate, up = w.chunk(2)
        return {
            prefix + rest.replace("linear_fc1", x): part.clone()
            for x, part in (("gate_proj", gate), ("up_proj", up))
        }
    return {prefix + rest: w}


def on_rank(layout: dict[str, Any], folder: Path) -> None:
    """One rank: writes the checkpoint (a world of one that makes it) or loads it, and files what it holds."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from safetensors.torch import save_file

    dist.init_process_group("gloo")
    ps.initialize_model_parallel(
        tensor_model_parallel_size=layout["tp"],
        pipeline_model_parallel_size=layout["pp"],
        expert_model_parallel_size=layout["ep"],
        expert_tensor_parallel_size=layout["etp"],
    )
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
    name = layout["model"]
    model = built(MODELS[name], layout)
    stored = folder / name
    if "save" in layout:
        save_file(numbered(model), HERE / name / "full.safetensors")
        stored.mkdir()
        dist_checkpointing.save(model.sharded_state_dict(), str(stored))
    else:
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(stored)))
        place = {
            "pp": ps.get_pipeline_model_parallel_rank(),
            "tp": ps.get_tensor_model_parallel_rank(),
            "ep": ps.get_expert_model_parallel_rank(),
            "etp": ps.get_expert_tensor_parallel_rank(),
        }
        label = "-".join(f"{key}{layout[key]}" for key in ("tp", "pp", "ep", "etp", "dp"))
        target = HERE / name / label / f"rank-{dist.get_rank()}.safetensors"
        target.parent.mkdir(exist_ok=True)
        held = {key: value.detach().contiguous() for key, value in model.named_parameters()}
        save_file(held, target, {"place": json.dumps(place), "layout": json.dumps(layout)})
    dist.barrier()
    dist.destroy_process_group()


def launch(layout: dict[str, Any], folder: Path, port: int) -> None:
    """All ranks of one layout, each a process."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["WORLD_SIZE"] = str(layout["tp"] * layout["pp"] * layout["dp"])
    processes = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        os.environ["RANK"] = str(rank)
        # forked, for that Megatron is imported once
        processes.append(multiprocessing.get_context("fork").Process(target=on_rank, args=(layout, folder)))
        processes[-1].start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"layout {layout} failed")


def main() -> None:
    shims()
    wanted = sys.argv[1:] or list(MODELS)
    one = {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "dp": 1}
    every = [{"model": m, "save": True, **one} for m in MODELS] + LAYOUTS
    with tempfile.TemporaryDirectory() as folder:
        for at, layout in enumerate(every):
            if layout["model"] in wanted:
                (HERE / str(layout["model"])).mkdir(exist_ok=True)
                launch(layout, Path(folder), 29700 + at)


if __name__ == "__main__":
    main()
