"""Small checkpoints of other programs, written from a model's weights by the layout that those programs document."""

from __future__ import annotations

import argparse
import sys
import types
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

PAD_TO = 128


def save_megatron(folder: Path, state: dict[str, Tensor], heads: int, kv_heads: int, tp: int, pp: int) -> None:
    """Megatron core's files: `iter_0000007/mp_rank_TT_PPP/model_optim_rng.pt`, queries, keys and values by group."""
    num_layers = 1 + max(int(name.split(".")[2]) for name in state if ".layers." in name)
    per_stage = num_layers // pp
    for stage in range(pp):
        for rank in range(tp):
            model: dict[str, Any] = {}
            if stage == 0:
                model["embedding.word_embeddings.weight"] = vocabulary(state["model.embed_tokens.weight"], tp)[rank]
            for local in range(per_stage):
                theirs = f"model.layers.{stage * per_stage + local}."
                layer = {name.removeprefix(theirs): t for name, t in state.items() if name.startswith(theirs)}
                own = megatron_layer(layer, heads, kv_heads, tp, rank)
                model |= {f"decoder.layers.{local}.{name}": tensor for name, tensor in own.items()}
            if stage == pp - 1:
                model["decoder.final_layernorm.weight"] = state["model.norm.weight"]
                if "lm_head.weight" in state:
                    model["output_layer.weight"] = vocabulary(state["lm_head.weight"], tp)[rank]
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")
            path = folder / "iter_0000007" / name / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            args = argparse.Namespace(tensor_model_parallel_size=tp, num_attention_heads=heads)
            torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": model}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")


def vocabulary(weight: Tensor, tp: int) -> list[Tensor]:
    """The rows padded to a multiple of PAD_TO * tp, cut."""
    rows = -(-len(weight) // (PAD_TO * tp)) * PAD_TO * tp
    padded = torch.full((rows, weight.shape[1]), 3.5)
    padded[: len(weight)] = weight
    return [part.clone() for part in padded.chunk(tp)]


def megatron_layer(layer: dict[str, Tensor], heads: int, kv_heads: int, tp: int, rank: int) -> dict[str, Any]:
    """A rank's part of a layer: whole query groups; its own rows of gate above its own rows of up."""
    per_group = heads // kv_heads
    own: dict[str, Any] = {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" not in layer:
            continue
        q, k, v = (layer[f"self_attn.{which}_proj.{kind}"] for which in "qkv")
        head = len(k) // kv_heads
        rows: list[Tensor] = []
        for group in range(rank * kv_heads // tp, (rank + 1) * kv_heads // tp):
            rows += [q[group * per_group * head : (group + 1) * per_group * head]]
            rows += [k[group * head : (group + 1) * head], v[group * head : (group + 1) * head]]
        own[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
    own["self_attention.linear_qkv.layer_norm_weight"] = layer["input_layernorm.weight"]
    own["self_attention.linear_qkv._extra_state"] = torch.zeros(8, dtype=torch.uint8)
    own["self_attention.linear_proj.weight"] = layer["self_attn.o_proj.weight"].chunk(tp, 1)[rank].clone()
    own["mlp.linear_fc1.weight"] = torch.cat(
        [layer[f"mlp.{name}_proj.weight"].chunk(tp)[rank] for name in ("gate", "up")]
    )
    own["mlp.linear_fc2.weight"] = layer["mlp.down_proj.weight"].chunk(tp, 1)[rank].clone()
    own["mlp.linear_fc1.layer_norm_weight"] = layer["post_attention_layernorm.weight"]
    return own


def save_zero3(folder: Path, state: dict[str, Tensor], world_size: int, frozen: set[str]) -> None:
    """DeepSpeed's files of ZeRO-3: padded parts in flat fp32 groups, two of them; frozen parameters by name."""
    scaler = foreign_class("deepspeed.runtime.fp16.loss_scaler", "LossScaler")
    trained = {name: tensor for name, tensor in state.items() if name not in frozen}
    parts = {name: padded_parts(tensor, world_size) for name, tensor in state.items()}
    tag = folder / "global_step12"
    tag.mkdir(parents=True)
    for rank in range(world_size):
        own = [parts[name][rank] for name in trained]
        middle = len(own) // 2
        optimizer = {
            "loss_scaler": scaler(),
            "zero_stage": 3,
            "partition_count": world_size,
            "fp32_flat_groups": [torch.cat(own[:middle]), torch.cat(own[middle:])],
            "optimizer_state_dict": {"state": {}, "param_groups": []},
        }
        model = {
            "module": OrderedDict(),
            "buffer_names": [],
            "param_shapes": [OrderedDict((name, tensor.shape) for name, tensor in trained.items())],
            "frozen_param_shapes": OrderedDict((name, state[name].shape) for name in frozen),
            "frozen_param_fragments": OrderedDict((name, parts[name][rank]) for name in frozen),
            "shared_params": {},
            "ds_version": "0.16.0",
        }
        torch.save({"optimizer_state_dict": optimizer}, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save(model, tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step12")
    for module in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[module]


def padded_parts(tensor: Tensor, world_size: int) -> list[Tensor]:
    part = -(-tensor.numel() // world_size)
    flat = torch.full((part * world_size,), 7.25)
    flat[: tensor.numel()] = tensor.flatten()
    return list(flat.split(part))


def foreign_class(module: str, name: str) -> type:
    """A class of a package that is not installed, which a pickle can name."""
    made = type(name, (), {"__module__": module, "__reduce__": lambda self: (type(self), (), {"cur_scale": 1.0})})
    steps = module.split(".")
    for length in range(1, len(steps) + 1):
        package = ".".join(steps[:length])
        sys.modules[package] = types.ModuleType(package)
    setattr(sys.modules[module], name, made)
    return made


class Linear(nn.Module):
    """A parameter called weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Rows for rotary pairs that are neighbours: row 2i of a head is its row i, row 2i + 1 its row i + d/2."""
    half = len(weight) // num_heads // 2
    order = [head * 2 * half + place for head in range(num_heads) for i in range(half) for place in (i, i + half)]
    return weight[order]


def titan_model(state: dict[str, Tensor], heads: int, kv_heads: int) -> nn.Module:
    """torchtitan's Llama 3 as a tree of parameters under its names."""
    names = {
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    }  # fmt: skip
    root = nn.Module()
    for name, tensor in state.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if "attention.wq" in name or "attention.wk" in name:
            tensor = interleaved(tensor, heads if "wq" in name else kv_heads)
        *path, _ = name.split(".")
        node = root
        for step in path[:-1]:
            if not hasattr(node, step):
                node.add_module(step, nn.ModuleDict() if step == "layers" else nn.Module())
            node = node[step] if isinstance(node, nn.ModuleDict) and step in node else getattr(node, step)
        node.add_module(path[-1], Linear(tensor))
    return root


def save_titan(rank: int, world_size: int, folder: str, state: dict[str, Tensor], heads: int, kv_heads: int) -> None:
    """What torchtitan's checkpointer writes: FSDP2's shards, the optimizer's state and the trainer's, through DCP."""
    model = titan_model(state, heads, kv_heads)
    fully_shard(model)
    entries: dict[str, Any] = dict(model.state_dict())
    entries |= {f"optimizer.state.{name}.exp_avg": torch.zeros_like(t) for name, t in model.state_dict().items()}
    entries |= {"train_state": {"step": torch.tensor(3)}, "dataloader": {f"dp_rank_{rank}": b"position"}}
    entries["lr_scheduler"] = {"last_epoch": 3}
    dcp.save(entries, checkpoint_id=folder)
    dist.barrier()
