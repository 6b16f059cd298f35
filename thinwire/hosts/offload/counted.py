"""What a micro-batch takes in memory, counted before it runs: a step on tensors without memory, storages followed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from thinwire.hosts.offload.activations import KeptStorages, kept, recompute
from thinwire.hosts.offload.sampling import RowSampler
from thinwire.hosts.offload.spill import NUM_AHEAD
from thinwire.hosts.offload.storages import StorageFollower
from thinwire.hosts.offload.tiling import tile as cut_into_tiles
from thinwire.layout.layers import layers_of
from thinwire.losses import cut_loss, loss_in_effect
from thinwire.methods.memory.residency import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_FROM_DISK, SAVED, SAVED_INPUTS
from thinwire.models.hf import HFCausalLM
from thinwire.models.llama import Llama, LlamaConfig

# In which a forward may compute.
DTYPES = ("bf16", "fp32")


@dataclass(frozen=True)
class CountedBatch:
    """What is computed on a CPU, with its kernels.

    Args:
        of: the sizes of a Llama, or a model of transformers on the device meta.
        loss: see `loss_in_effect`.
        dtype: "bf16", whose copies of weights are kept too, or "fp32".
        slices: see `in_slices`. tile, sampled: see Residency.
        recomputes: each layer keeps only its input.
    """

    of: LlamaConfig | HFCausalLM
    loss: str
    batch: int
    seq_len: int
    dtype: str
    slices: int = 1
    tile: str | None = None
    sampled: float | None = None
    recomputes: bool = False

    @property
    def num_layers(self) -> int:
        return self.of.num_hidden_layers if isinstance(self.of, LlamaConfig) else len(layers_of(self.of))

    def step_bytes(self) -> StepMemory:
        """Of one and of two layers, if all are alike; else of all."""
        if isinstance(self.of, LlamaConfig):
            return _of_llama(self)
        return self._of_alike() if _are_alike(layers_of(self.of)) else self._of_unlike()

    def _of_alike(self) -> StepMemory:
        (one, _), (two, peak) = self._stepped(1), self._stepped(2)
        layer = two.bytes - one.bytes
        return StepMemory(one.bytes - layer, layer, self.num_layers, peak - two.bytes)

    def _of_unlike(self) -> StepMemory:
        """Of layers the mean. What belongs to none of them is what a forward keeps beside all of their inputs."""
        whole, peak = self._stepped(None)
        again = whole if self.recomputes else replace(self, recomputes=True)._stepped(None)[0]
        ends = min(whole.bytes, again.bytes - again.given)
        layer = (whole.bytes - ends) // max(1, self.num_layers)
        return StepMemory(ends, layer, self.num_layers, peak - whole.bytes)

    def _stepped(self, num_layers: int | None) -> tuple[KeptStorages, int]:
        """What a forward of so many layers keeps; None: of all.

        Also the most that is in memory until the last layer's backward has ended: later there is less of all layers'.
        """
        # Parameters on meta are no fake tensors, and are copied before there are any.
        found: nn.Module | None = None if isinstance(self.of, LlamaConfig) else copy.deepcopy(self.of)
        with FakeTensorMode():
            if isinstance(self.of, LlamaConfig):
                # Rows of an embedding are looked up by values, and there are none.
                ties = self.of.tie_word_embeddings and self.tile is None
                found = Llama(replace(self.of, num_hidden_layers=num_layers or 0, tie_word_embeddings=ties))
            assert found is not None
            _on_cpu(found, num_layers)
            tokens = torch.zeros(self.batch, self.seq_len, dtype=torch.int64)
            self._change(found, tokens)
            params = [*found.parameters()]
            with StorageFollower(*params, *found.buffers(), tokens) as follower:
                ends = _note_end(found, follower)
                with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16"):
                    of_forward, loss = kept(found, lambda: found(tokens, tokens))
                # A constant, since an implementation asks whether it is 1.
                loss.backward(torch.tensor(1.0, dtype=loss.dtype))
                del loss
            # Gradients of weights are counted where they wait.
            grads = [param.grad for param in params if param.grad is not None]
            return of_forward, follower.peak_bytes(grads, next(iter(ends), None))

    def _change(self, model: nn.Module, tokens: Tensor) -> None:
        """Make the model compute as it will in training."""
        if loss_in_effect(self.loss, tokens.numel(), vocabulary_of(model) or 0)[0] == "cut":
            cut_loss(model, model.lm_head if isinstance(model, Llama) else None)
        if self.tile is not None:
            cut_into_tiles(model, self.tile, tables=False, must=False)
        if self.sampled is not None:
            RowSampler(model, self.sampled, chooses=_any_rows)
        if self.recomputes:
            recompute(model, min(self.slices, self.batch))


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a micro-batch takes.

    Attributes:
        ends: what a forward keeps that belongs to no layer, as of the loss.
        layer: what it keeps of one layer.
        passing: the most that forward and backward have in memory besides what a forward keeps, and the gradients of
            weights.
    """

    ends: int
    layer: int
    num_layers: int
    passing: int

    @property
    def kept(self) -> int:
        return self.ends + self.num_layers * self.layer

    def peak_bytes(self, num_layers: int | None = None) -> int:
        """The most that is in memory, if that of only so many layers is there at a time; None: of all."""
        there = self.num_layers if num_layers is None else min(num_layers, self.num_layers)
        return self.ends + there * self.layer + self.passing


@lru_cache
def _of_llama(counted: CountedBatch) -> StepMemory:
    """Counted once in a process: it takes a second, and each strategy and budget asks for the same."""
    return counted._of_alike()


def kept_of(
    model: nn.Module, loss: str, batch: int, seq_len: int, dtype: str = "auto", slices: int = 1,
    tile: str | None = None, sampled: float | None = None,
) -> dict[str, int] | None:  # fmt: skip
    """What `kept_ways` says of a model on the device meta; None: it is not known, as of mixtures of experts.

    Known are ours, and those of transformers whose forward asks for no values.
    """
    given = loss, batch, seq_len, dtype, slices, tile, sampled
    if type(model) is Llama:
        return kept_ways(model.config, *given)
    try:
        return kept_ways(model, *given) if isinstance(model, HFCausalLM) else None
    except Exception:
        # Each foreign model fails in a way of its own on tensors without values; the start-up table says so.
        return None


def kept_ways(
    of: LlamaConfig | HFCausalLM, loss: str, batch: int, seq_len: int, dtype: str = "auto", slices: int = 1,
    tile: str | None = None, sampled: float | None = None,
) -> dict[str, int]:  # fmt: skip
    """The most bytes of a micro-batch in memory if activations are kept; with layers computed again; and on a disk.

    Of those on a disk, two layers' are in memory; of inputs on a disk those of three layers, which are read ahead. What
    belongs to no layer is in memory as a whole. SAVED is all that a forward keeps, SAVED_INPUTS all that it keeps if
    layers are computed again: with either, as much lies on the disk.

    dtype: "auto": the larger of both. Else see CountedBatch.
    """
    if dtype not in DTYPES:
        both = [kept_ways(of, loss, batch, seq_len, each, slices, tile, sampled) for each in DTYPES]
        return {way: max(each[way] for each in both) for way in both[0]}
    plain = CountedBatch(of, loss, batch, seq_len, dtype, tile=tile, sampled=sampled)
    # A batch is cut into slices where layers are computed again.
    whole, again = plain.step_bytes(), replace(plain, slices=slices, recomputes=True).step_bytes()
    return {
        KEEP: whole.peak_bytes(), OFFLOAD: whole.peak_bytes(2), SAVED: whole.kept,
        RECOMPUTE: again.peak_bytes(), RECOMPUTE_FROM_DISK: again.peak_bytes(NUM_AHEAD + 1), SAVED_INPUTS: again.kept,
    }  # fmt: skip


def _note_end(model: nn.Module, follower: StorageFollower) -> list[int]:
    """A list that gets the number of events when the last layer's backward has ended."""
    ends: list[int] = []

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: ends.append(follower.num_events))

    for layer in layers_of(model)[-1:]:
        layer.register_forward_pre_hook(note)
    return ends


def _any_rows(weights: Tensor, num: int, seed: int) -> tuple[Tensor, Tensor]:
    """As many rows as `chosen` keeps, where rows have no values."""
    kept = (*weights.shape[:-1], num)
    return torch.zeros(kept, dtype=torch.int64), torch.ones(kept)


def vocabulary_of(model: nn.Module) -> int | None:
    """Words of a model's head; None: not known."""
    if isinstance(model, HFCausalLM):
        return int(model.model.config.vocab_size)
    return model.config.vocab_size if isinstance(model, Llama) else None


def _are_alike(layers: Sequence[nn.Module]) -> bool:
    """Whether one or two of the layers tell of all."""
    shapes = {(type(layer), *((name, param.shape) for name, param in layer.named_parameters())) for layer in layers}
    return len(shapes) == 1


def _on_cpu(model: nn.Module, num_layers: int | None) -> None:
    """Make parameters and buffers on meta fake tensors of a CPU, and leave so many layers of them."""
    for parent in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
        if num_layers is not None and layers_of(model)[:1] == list(parent)[:1]:
            del parent[num_layers:]
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                if param not in made:
                    values = torch.empty(param.shape, dtype=torch.float32)
                    made[param] = nn.Parameter(values, requires_grad=param.requires_grad)
                module._parameters[name] = made[param]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
