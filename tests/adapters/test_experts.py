"""Mixtures of transformers whose expert parallelism sends rows by thinwire: as by its own all-to-all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.workers import run_workers
from thinwire import ConfigError, ExpertParallel
from thinwire.collectives import Communicator, Topology

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.distributed.expert_parallel")
from thinwire.adapters.experts import register_experts  # noqa: E402

LENGTH = 12


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(folder: str, rank: int, implementation: str) -> list[Tensor]:
    """Loss and gradients of a rank's own text."""
    from transformers.distributed import DistributedConfig

    spread = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation=implementation)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=spread, dtype=torch.float64, experts_implementation="eager"
    )
    tokens = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(rank))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(whole(param.grad) for param in model.parameters() if param.grad is not None)]


def both(rank: int, world_size: int, folder: str) -> Any:
    rows = register_experts(ExpertParallel(chunks=3), local_size=1, timeout_s=60)
    found = trained(folder, rank, "thinwire")
    sent_bytes = rows.meter.snapshot().sent_by("dispatch")
    rows.close()
    rows = register_experts(
        ExpertParallel(dispatch="int8", combine="bf16", gradients="int8", chunks=2), local_size=1, timeout_s=60
    )
    rounded = trained(folder, rank, "thinwire")
    fewer = rows.meter.snapshot().sent_by("dispatch") / sent_bytes
    rows.close()
    return trained(folder, rank, "all_to_all"), found, sent_bytes, rounded, fewer


def test_rows_of_transformers_experts_travel_by_thinwire(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        router_aux_loss_coef=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    for truth, found, sent_bytes, rounded, fewer in run_workers(both, 2, str(tmp_path)):
        assert len(truth) > 10
        for expected, exact in zip(truth, found, strict=True):
            torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)
        # Rows of 32 numbers as 32 bytes and a scale, in place of 8 bytes each.
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(rounded, truth, strict=True)]
        assert 1e-6 < max(errors) < 0.1 and fewer < 0.2
        # Some of a rank's 24 tokens have experts of the other one, in each of two layers.
        num_rows, rest = divmod(sent_bytes - 2 * 8 * 3, 8 * 32)
        assert 0 < num_rows < 2 * 2 * 24 and rest == 0


def test_options_become_codecs_and_chunks() -> None:
    made = register_experts(ExpertParallel(dispatch="int8", combine="bf16", gradients="int8/16", chunks=4))
    wire = made._wire(Communicator(), SimpleNamespace(num_experts=4), 32)
    assert list(map(str, (wire.dispatch, wire.combine, wire.gradients))) == ["int8/32", "bf16", "int8/16"]
    assert (wire.num_chunks, wire.placement.experts, list(wire.hops)) == (4, 4, [])
    # Rows are numbered over all ranks: the second group of two does not draw what the first one does.
    place: Any = SimpleNamespace(world_size=2, rank=1, global_ranks=[1, 3], topology=Topology(1, 2))
    assert made._wire(place, SimpleNamespace(num_experts=4), 32).own_number == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parallel": 4}, "parallel 4 for transformers: ep_size says it; nearest: 1"),
        ({"parallel": 1, "move": "experts"}, "nearest: 'tokens'"),
        ({"route": "once"}, "nearest: '2dh'"),
        ({"chunks": "auto"}, "thinwire train chooses it, a library states it; nearest: 1"),
    ],
)
def test_options_of_own_mixtures_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        register_experts(ExpertParallel(**options))
