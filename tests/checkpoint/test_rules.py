"""The pattern language by itself: layouts, rules, and folders of safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from thinwire.checkpoint.foreign import (
    Averaged,
    FusedShards,
    RankLayout,
    Replicated,
    Rule,
    SafetensorsSource,
    Sharded,
    Unique,
    assign,
    consolidate,
    left_out,
)
from thinwire.checkpoint.foreign.sources import join_flat, piece_numel
from thinwire.checkpoint.weights_folder import new_folder, write_weights
from thinwire.errors import ConfigError, ThinwireError
from thinwire.tiers.tensor_file import StoredTensors


class InMemory:
    """A checkpoint that a test has made."""

    def __init__(self, shards: dict[str, list[Tensor]]) -> None:
        self.held = shards

    def names(self) -> Iterable[str]:
        return self.held

    def shards(self, name: str) -> list[Tensor]:
        return self.held[name]


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_along_a_dimension_are_put_together(dim: int) -> None:
    whole = values(12, 10)
    assert torch.equal(Sharded(dim).join(whole.split(5, dim)), whole)


def test_fused_parts_are_cut_one_by_one() -> None:
    # 8 heads of queries, 2 of keys and of values, 16 wide, over two ranks: 64 + 16 + 16 rows each.
    q, k, v = values(128, 4), values(32, 4) + 1, values(32, 4) + 2
    shards = [torch.cat([part.chunk(2)[rank] for part in (q, k, v)]) for rank in range(2)]
    whole = torch.cat([q, k, v])
    assert torch.equal(FusedShards((8, 2, 2)).join(shards), whole)
    assert not torch.equal(Sharded(0).join(shards), whole)
    with pytest.raises(ConfigError, match="96 rows on a rank are not cut into parts"):
        FusedShards((8, 3)).join(shards)


def test_replicas_are_compared_and_averages_taken() -> None:
    assert torch.equal(Replicated().join([values(3), values(3)]), values(3))
    with pytest.raises(ConfigError, match=r"rank\(s\) \[1\] hold other values"):
        Replicated().join([values(3), values(3) + 1])
    assert torch.equal(Averaged().join([torch.ones(4), 3 * torch.ones(4)]), 2 * torch.ones(4))
    with pytest.raises(ConfigError, match="2 ranks hold it"):
        Unique().join([values(3), values(3)])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.weight", "b.bias", "c.bias"], "no rule matches b.bias, c.bias:"),
        (["a.weight", "a.norm.weight"], r"more than one rule matches a.norm.weight"),
    ],
)
def test_a_table_covers_every_name_once(names: list[str], message: str) -> None:
    rules = [Rule(r"a\.(?:.*\.)?weight"), Rule(r".*norm\.weight")]
    with pytest.raises(ConfigError, match=message):
        assign(names, rules)


def test_a_rule_renames_cuts_and_strips() -> None:
    source = InMemory({
        "wte": list(values(128, 4).bfloat16().chunk(2)),
        "h.3.fc": [values(6, 4)[[0, 1, 2]], values(6, 4)[[3, 4, 5]]],
        "opt.step": [],
    })  # fmt: skip
    rules = [
        Rule("wte", ("embed",), Sharded(0), num_rows=100),
        Rule(r"h\.(\d+)\.fc", (r"\1.gate", r"\1.up"), Sharded(0), cut=lambda tensor: tensor.chunk(2)),
        left_out(r"opt\..*"),
    ]
    found = dict(consolidate(source, rules))
    assert list(found) == ["embed", "3.gate", "3.up"]
    assert found["embed"].dtype == torch.float32
    assert torch.equal(found["embed"], values(128, 4).bfloat16().float()[:100])
    assert torch.equal(found["3.up"], values(6, 4)[3:])
    rules[0] = Rule("wte", ("embed",), Sharded(0), num_rows=129)
    with pytest.raises(ConfigError, match="wte: 128 rows, and the config asks for 129"):
        list(consolidate(source, rules))


def test_two_parameters_may_not_become_one() -> None:
    source = InMemory({"x.w": [values(2)], "y.w": [values(2)]})
    with pytest.raises(ConfigError, match=r"both x\.w and y\.w would become w"):
        next(consolidate(source, [Rule(r"[xy]\.w", ("w",))]))


@pytest.mark.parametrize(
    ("numel", "world_size", "sizes"),
    # Of 5 elements on 4 ranks the last rank has none; of 1,024 on 3 the padding is 2.
    [(5, 4, [2, 2, 1, 0]), (1024, 3, [342, 342, 340]), (1, 3, [1, 0, 0]), (6, 3, [2, 2, 2])],
)
def test_flat_pieces_lose_their_padding(numel: int, world_size: int, sizes: list[int]) -> None:
    assert [piece_numel(numel, rank, world_size) for rank in range(world_size)] == sizes
    part = -(-numel // world_size)
    padded = torch.cat([values(numel), torch.full((part * world_size - numel,), 9.0)])
    assert torch.equal(join_flat(padded.split(part), torch.Size([numel])), values(numel))


@pytest.mark.parametrize("shard_bytes", [1 << 20, 200])
def test_a_folder_is_read_as_it_was_written(tmp_path: Path, shard_bytes: int) -> None:
    tensors = {f"t{i}": values(5, i + 1) for i in range(6)} | {"view": values(9, 9)[:, 0]}
    assert write_weights(tmp_path, tensors.items(), shard_bytes) == {name: t.shape for name, t in tensors.items()}
    num_files = len(list(tmp_path.glob("*.safetensors")))
    assert (num_files == 1) == (shard_bytes > 200)
    assert (tmp_path / "model.safetensors.index.json").exists() == (num_files > 1)
    source = SafetensorsSource(tmp_path)
    assert dict.fromkeys(tensors, True) == {n: torch.equal(source.shards(n)[0], tensors[n]) for n in source.names()}


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.uint8, torch.float32), (torch.bool,)])
def test_a_file_of_tensors_is_that_of_safetensors(tmp_path: Path, dtypes: tuple[torch.dtype, ...]) -> None:
    tensors = {f"t{i}": values(3, i + 1).to(dtype) for i, dtype in enumerate(dtypes)} | {"one": torch.tensor(1.5)}
    write_weights(tmp_path, tensors.items())
    found: dict[str, Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        found |= load_file(path)
        file = StoredTensors(path)
        assert all(torch.equal(file.read(name), tensors[name]) for name in file.shapes)
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    # What would not be aligned behind the others begins a file.
    assert len(list(tmp_path.glob("*.safetensors"))) == (2 if dtypes[0] != torch.float32 else 1)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    write_weights(tmp_path, [("a", values(50)), ("b", values(50))], 200)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-20])
    with pytest.raises(ThinwireError, match=f"{first.name} is damaged"):
        SafetensorsSource(tmp_path)
    first.unlink()
    with pytest.raises(ConfigError, match=f"{first.name} holds a, which it does not"):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="is damaged"):
        SafetensorsSource(tmp_path)
    second.unlink()
    with pytest.raises(ConfigError, match=r"holds no .safetensors file"):
        SafetensorsSource(tmp_path)


def test_a_folder_is_complete_or_absent(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as folder:
        (folder / "half").write_text("")
        raise ZeroDivisionError
    assert not any(tmp_path.iterdir())
    with new_folder(tmp_path / "out") as folder:
        (folder / "whole").write_text("")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]
    with pytest.raises(ConfigError, match=r"out is there already: .* such as .*out-2"), new_folder(tmp_path / "out"):
        pass


def test_layouts_are_layouts() -> None:
    layouts: list[RankLayout] = [Unique(), Replicated(), Averaged(), Sharded(), FusedShards((1,))]
    assert all(torch.equal(layout.join([values(4)]), values(4)) for layout in layouts)
