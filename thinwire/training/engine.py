"""An engine takes steps: it has the model on its device, the parallel optimizer, and this rank's share of the text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thinwire.codecs import derive_seed
from thinwire.collectives import ElasticPeers, Peers
from thinwire.compose import parallelize
from thinwire.data import BatchLoader, Tokenizer, documents_of, heldout_batches, load_tokenizer
from thinwire.data.loader import IGNORED
from thinwire.device import Device
from thinwire.hosts.experts import ExpertRanks
from thinwire.hosts.offload.hollow import any_values, hollow
from thinwire.hosts.pipeline.forward import LastLogits
from thinwire.layout.layers import layers_of
from thinwire.layout.mesh import MeshShape
from thinwire.losses import cut_loss, head_of
from thinwire.methods.memory import Residency, Setup
from thinwire.methods.outer.base import connect
from thinwire.methods.pipeline.across import ranks_across
from thinwire.models import build_model, generate
from thinwire.models.build import build_skeleton
from thinwire.models.capacity import RowLoad
from thinwire.models.distil import Distillation
from thinwire.models.first import FirstWeights
from thinwire.models.hf import hollow_hf
from thinwire.models.llama import Llama, positions_in
from thinwire.models.moe import MoELlama
from thinwire.models.tensor import cut_over
from thinwire.options import model_table
from thinwire.run.config import PER_MACHINE, TrainConfig, derive
from thinwire.run.optimizer import optimizer_over
from thinwire.run.place import ProcessPlace
from thinwire.run.residency import resolved, why_whole
from thinwire.run.run import Run, tokens_of
from thinwire.training.soonest import ChosenResidency, chosen

# Of torch.compile.
COMPILER = "inductor"
# Under a budget, the lengths of a sample are multiples of this.
PADDED = 64


@dataclass(frozen=True)
class Corpus:
    """The tokens of a run. digest: a hash of all of them."""

    tokenizer: Tokenizer
    train: np.ndarray
    heldout: np.ndarray
    num_tokens: int
    digest: str

    @classmethod
    def of(cls, config: TrainConfig) -> Corpus:
        """Read the text, or the tokens that an earlier run has saved for it."""
        tokenizer = load_tokenizer(config.tokenizer)
        tokens = tokens_of(config, tokenizer)
        train, heldout = tokens.split(config.seq_len)
        return cls(tokenizer, train, heldout, tokens.info.num_tokens, tokens.info.digest)


class Engine:
    """A model in training on one rank. Making it, on every rank, is a collective.

    dtype: "bf16" or "fp32", for forward and backward; weights and sums are fp32.
    """

    def __init__(self, run: Run, place: ProcessPlace, device: Device, corpus: Corpus, dtype: str) -> None:
        config = self.config = run.config
        self.place, self.device, self.corpus, self.dtype = place, device, corpus, dtype
        shape = config.mesh_shape
        # Ranks of the tensor axis, of a sequence and of a pipeline see the same data.
        self.num_shares = place.num_ranks // shape.shared
        mesh = mesh_of(shape, device, run.pipeline.across if run.pipeline else "")
        # Tensor and sequence are the innermost axes of an island.
        num_replicas = place.world_size // shape.shared
        replica = place.rank // (shape.tensor * shape.sequence) % num_replicas
        self.replica = mesh.get_local_rank("data") if shape.pipeline > 1 else replica, num_replicas
        self.share = place.island.number * num_replicas + self.replica[0]
        self.batch = derive(config, self.num_shares)
        fields = config.tables.get(model_table(config.model) or "")
        made = built(run, corpus.tokenizer.vocab_size, fields, device, partial(chosen, run, device, dtype))
        self.model, self.why_whole, self.is_uncounted = device.place(made.model), made.why_whole, made.is_uncounted
        self.choice = made.choice
        # Layers that are computed again send what a forward sends once more.
        self.forwards = 2 if made.residency is not None and made.residency.recomputes else 1
        self.shapes = {name: list(param.shape) for name, param in self.model.named_parameters()}
        self.frozen, self.buffers = untrained(self.model)
        head: nn.Module | None = None
        if config.loss == "cut":
            # A model whose weights are to come from a disk has no forward to find it by.
            with any_values(self.model):
                head = self.model.lm_head if isinstance(self.model, Llama) else head_of(self.model)
        if head is not None and shape.pipeline == 1:
            cut_loss(self.model, head)
        self.distillation = None
        if config.teacher is not None:
            teacher = device.place(build_model(config.teacher, corpus.tokenizer.vocab_size, config.seq_len))
            self.distillation = Distillation(self.model, teacher, config.teacher_weight)
        if shape.tensor > 1:
            cut_over(self.model, mesh["tensor"])
        if config.compile:
            compile_layers(self.model)
        optimizer = build_optimizer(config, self.model)
        self.num_parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        # In training the wrapped module is called, which may communicate; everywhere else the model itself.
        strategy = connect(
            run.strategy, partial(meet_others, config, place), lambda: common_options(config, corpus.digest)
        )
        # Compiled code does not wait for weights that are still on their way.
        layouts = run.pipeline, run.sequence, run.experts, made.residency
        methods = [*(each for each in layouts if each is not None), strategy]
        self.stage = parallelize(
            self.model, optimizer, mesh, methods, local_size=config.local_size, seed=config.seed,
            timeout_s=config.timeout, checked=config.checked, overlap=not config.compile, initial=made.initial,
            announce=False,
        )  # fmt: skip
        if head is not None and self.stage.pipeline is not None:
            self.stage.pipeline.cut_loss(head)
        self.wrapped, self.optimizer = self.stage.module, self.stage.optimizer
        self.loader = BatchLoader(
            corpus.train, seq_len=config.seq_len, micro_batch=self.batch.micro_batch,
            accumulation=self.batch.accumulation, rank=self.share, world_size=self.num_shares, seed=config.seed,
        )  # fmt: skip
        torch.manual_seed(derive_seed(config.seed, self.share, *self._place_in_share) >> 1)
        # The token that ends a document, if documents are kept apart.
        self.end = corpus.tokenizer.end_of_document if config.documents else None
        # Of the sequences of each micro-batch of the step.
        self._numbers: list[Tensor] = []
        self.come_again = config.steps * self.loader.sequences_per_step > self.loader.num_sequences
        self._forward_s = 0.0
        if self.distillation is not None and self.distillation.weight is None:
            self.distillation.weight = self._even_weight(self.distillation)

    @property
    def _place_in_share(self) -> tuple[int, ...]:
        """Numbers that make random states differ between ranks with the same data, whose tokens or layers differ."""
        ranks, pipeline = self.config.mesh_shape.sequence, self.stage.pipeline
        if pipeline is not None and pipeline.num_stages > 1:
            return (pipeline.number,)
        return (self.place.rank % ranks,) if ranks > 1 else ()

    def seed_after(self, step: int) -> int:
        """The seed for the random generators of a rank without a saved state of its own."""
        return derive_seed(self.config.seed, self.share, step, *self._place_in_share) >> 1

    def forward_backward(self) -> float:
        """Run the next batches through the model.

        Return the seconds of the forward passes, with the waiting for weights.
        """
        self._forward_s = 0.0
        batches = self._batches()
        self.stage.forward_backward(batches, self._loss_of)
        return self._forward_s

    def settle(self) -> None:
        """See PipelineStage.settle."""

        def loss(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
            with self._autocast():
                return module(*batch)

        if self.stage.pipeline is not None:
            self.stage.pipeline.settle(self.batches_on_meta, loss)

    def _batches(self) -> list[tuple[Tensor, ...]]:
        """This rank's micro-batches of the next step: tokens and targets.

        With documents also each token's document, and the weight of the micro-batch's loss, in proportion to its number
        of targets: the mean over all micro-batches and ranks is then the mean over all targets.
        """
        num = self.batch.accumulation
        each = None if self.end is None else self.loader.count_followed(self.end) / (num * self.num_shares)
        found: list[tuple[Tensor, ...]] = []
        self._numbers = []
        for _ in range(num):
            tokens, targets = self.loader.next_batch()
            self._numbers.append(torch.from_numpy(self.loader.numbers))
            if self.end is None or each is None:
                found.append(self.device.take((tokens, targets)))
                continue
            batch = documents_of(tokens, targets, self.end)
            weight = (batch[1] != IGNORED).sum(dtype=torch.float64) / each
            found.append((*self.device.take(batch), weight))
        return found

    @property
    def batches_on_meta(self) -> list[tuple[Tensor, Tensor]]:
        """A step's micro-batches, without memory."""
        tokens = torch.empty(self.batch.micro_batch, self.config.seq_len, device="meta")
        return [(tokens, tokens)] * self.batch.accumulation

    def take_row_load(self) -> RowLoad:
        """The rows that routers have sent to experts in this step, on all ranks; empty without experts."""
        return self.model.row_counts.take() if isinstance(self.model, MoELlama) else RowLoad()

    def take_teacher_loss(self) -> float:
        """The teacher's part of the step's loss, over all ranks; 0 without a teacher. A collective."""
        return 0.0 if self.distillation is None else self.optimizer.all_mean(self.distillation.take())

    def take_experts_s(self) -> float:
        """Seconds of the layers of experts that lie on several ranks, since the last call."""
        return 0.0 if self.stage.experts is None else self.stage.experts.watch.take()

    def follow(self, step: int) -> int:
        """Skip the steps that the other islands took while this one was away or had not started; the step reached."""
        if (position := self.optimizer.position) is None:
            return step
        self.loader.skip_steps(position - step)
        return position

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next update. A recovered stage multiplies it by a factor."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * self.stage.lr_factor

    def update(self) -> None:
        """Clip, and update the weights."""
        self.stage.update(self.config.grad_clip or math.inf)

    def _autocast(self) -> torch.autocast:
        # Copies of all weights would not fit where the weights don't.
        return self.device.autocast(self.dtype, caches=not self._weights_come_and_go)

    def _loss_of(self, module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        """The loss of one micro-batch; the forward's seconds are counted."""
        start = time.perf_counter()
        # A micro-batch may be passed more than once.
        self._numbers.append(self._numbers.pop(0))
        if torch.is_grad_enabled() and self.come_again:
            self.optimizer.note_sequences(self._numbers[-1])
        if isinstance(self.model, MoELlama):
            self.model.draws = derive_seed(self.config.seed, self.optimizer.steps), self._numbers[-1]
        if self.stage.experts is not None:
            self.stage.experts.tokens = partial(self._token_numbers, self.stage.experts, self._numbers[-1])
        if self.end is not None:
            *batch, weight = batch
            if isinstance(self.model, MoELlama):
                self.model.text_weight = float(weight) or 1.0
        with self._autocast():
            loss = module(*batch)
            if self.end is not None:
                # Without any target the mean is not a number, and has no gradient.
                loss = loss * weight.to(loss) if weight else torch.nan_to_num(loss, nan=0.0)
        self._forward_s += time.perf_counter() - start
        return loss

    def _token_numbers(self, experts: ExpertRanks, sequences: Tensor, num: int) -> Tensor:
        """Numbers of this rank's `num` tokens, int64 [num]: the same on any ranks for the tokens of these sequences."""
        if not self.model.training:
            return experts.wire.own_tokens(num)
        shared, tokens = self.stage.sequence, torch.zeros(1, num // len(sequences), dtype=torch.int64)
        positions = positions_in(tokens) if shared is None else shared.positions(tokens)
        return (sequences[:, None] * self.config.seq_len + positions).flatten()

    @torch.no_grad()
    def next_loss(self) -> float:
        """The loss that the next step would have. Trains nothing, and restores everything it changes."""
        with self._next_batches() as batches:
            return self.stage.next_loss(batches, self._loss_of)

    @contextmanager
    def _next_batches(self) -> Iterator[list[tuple[Tensor, ...]]]:
        """Yield this rank's batches of the next step. Afterwards the loader and the random generators are reset."""
        position, random, own_random = self.loader.state_dict(), torch.get_rng_state(), self.device.random_state()
        yield self._batches()
        self.loader.load_state_dict(position)
        torch.set_rng_state(random)
        if own_random is not None:
            self.device.set_random_state(own_random)

    def _even_weight(self, distillation: Distillation) -> float:
        """The teacher's weight at which text and teacher contribute equally to the next step, over all ranks.

        A collective.
        """
        self.optimizer.synchronize()
        with self._next_batches() as batches, self._autocast():
            parts = [distillation.parts(*batch) for batch in batches]
        text, errors = (self.optimizer.all_mean(float(sum(part))) for part in zip(*parts, strict=True))
        # A student that is its teacher has nothing to learn from it yet.
        return text / errors if errors else 1.0

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss on held-out sequences over all ranks, separately for each island; nats per token."""
        self.model.eval()
        total, num_targets = 0.0, 0
        for batch in heldout_batches(
            self.corpus.heldout, seq_len=self.config.seq_len, micro_batch=self.batch.micro_batch,
            rank=self.replica[0], world_size=self.replica[1],
            max_sequences=self.config.eval_sequences,
        ):  # fmt: skip
            given = self.device.take(batch if self.end is None else documents_of(*batch, self.end))
            num = len(batch[0]) if self.end is None else int((given[1] != IGNORED).sum())
            with self._autocast():
                loss = float(self.model(*given))
            total += loss * num if num else 0.0
            num_targets += num
        self.model.train()
        # Targets may differ in number between ranks, and batches never do: each forward may be one of all.
        return self.optimizer.all_mean(total) / self.optimizer.all_mean(num_targets)

    @property
    def ends_are_tied(self) -> bool:
        """Whether the first and the last stage share a weight."""
        return self.stage.pipeline is not None and bool(self.stage.pipeline.part.holdings.tied)

    @property
    def writes_sample(self) -> bool:
        """Whether this rank takes part in writing the sample: one of the ranks that hold the first copy of the model.

        Every token goes through the whole model, so a model whose weights come and go writes none.
        """
        return self.replica[0] < self.config.mesh_shape.expert and not self._weights_come_and_go

    @property
    def _weights_come_and_go(self) -> bool:
        """Whether there is never memory for all weights."""
        return self.optimizer.weights_pass or self.optimizer.weights_stay_cut

    @property
    def continuing(self) -> nn.Module:
        """The module that generates text."""
        pipeline = self.stage.pipeline
        return self.model if pipeline is None else LastLogits(pipeline.forward, self.model, self._multiple)

    @property
    def _multiple(self) -> int:
        """Of how many tokens the lengths of a sample are multiples."""
        # Rows of a mixture that are no text would take room from others.
        return PADDED if self.config.memory is not None and not isinstance(self.model, MoELlama) else 1

    def continued(self, prompt: list[int], num_new: int) -> list[int]:
        """The prompt and the model's continuation. Call it on all ranks that share the first copy of the model."""
        generator = torch.Generator(self.device.torch).manual_seed(self.config.seed)
        (tokens,) = self.device.take([torch.tensor([prompt])])
        multiple = self._multiple if self.continuing is self.model else 1
        with self._autocast():
            return generate(self.continuing, tokens, num_new, 0.8, generator, multiple)[0].tolist()

    def close(self) -> None:
        """Wait for all communication and give the process groups back."""
        self.optimizer.close()


class Built(NamedTuple):
    """A model; which parts lie on a disk.

    initial: gives the first values of parameters without memory, by name; None: the model is whole.
    choice: what lies where; None: all is in memory.
    is_uncounted: activations are not among what the budget was compared with.
    why_whole: why a model that will be cut is built whole on every rank, if it is.
    """

    model: nn.Module
    choice: ChosenResidency | None
    initial: Callable[[str], Tensor] | None = None
    why_whole: str = ""
    is_uncounted: bool = False

    @property
    def residency(self) -> Residency | None:
        """What lies where, with every "auto" decided but that of states."""
        return None if self.choice is None else self.choice.residency


def built(
    run: Run, vocab_size: int, fields: Mapping[str, Any] | None, device: Device,
    choose: Callable[[Residency, Setup], ChosenResidency] = lambda first, _: ChosenResidency(first),
) -> Built:  # fmt: skip
    """The model of a run; of one that lies on a disk, or is cut, only shapes, and what gives its first weights.

    choose: takes one of the ways that fit a budget; the first one is given.
    """
    config, choice = run.config, None
    size, why, is_uncounted = (config.model, vocab_size, config.seq_len), "", False
    passes = config.mesh_shape.pipeline > 1
    if run.residency is not None:
        skeleton = build_skeleton(*size, fields)
        residency, setup = resolved(run, skeleton)
        choice = choose(residency, setup)
        residency = choice.residency
        is_uncounted = residency.memory is not None and setup.kept is None
        if device.torch.type == "cpu" and (residency.weights == "disk" or setup.is_cut):
            why = why_whole(config.model, skeleton)
            passes = passes or not why
    if passes:
        shapes, initial, why = unfilled(run, vocab_size, fields)
        if shapes is not None:
            return Built(hollow(shapes, device.torch), choice, initial, is_uncounted=is_uncounted)
    return Built(build_model(*size, config.seed, fields), choice, why_whole=why, is_uncounted=is_uncounted)


def unfilled(
    run: Run, vocab_size: int, fields: Mapping[str, Any] | None
) -> tuple[nn.Module | None, Callable[[str], Tensor] | None, str]:
    """A model without memory for its parameters, and what gives them; or why it must be built whole."""
    config = run.config
    if config.mesh_shape.tensor > 1:
        return None, None, "the tensor axis cuts matrices before stages are cut"
    if config.model.startswith("hf:"):
        return hollow_hf(config.model.removeprefix("hf:"), vocab_size, config.seq_len, fields or {})
    skeleton = build_skeleton(config.model, vocab_size, config.seq_len, fields)
    assert isinstance(skeleton, Llama)
    return skeleton, FirstWeights(skeleton, config.seed), ""


def mesh_of(shape: MeshShape, device: Device, across: str) -> DeviceMesh:
    """The mesh of this process group, or of its island: only the data axis if nothing is cut. across: see Pipeline."""
    inside = {name: size for name, size in shape.sizes.items() if name != "island"}
    sizes = inside if shape.shared * shape.expert > 1 else {"data": dist.get_world_size()}
    if shape.pipeline > 1:
        ranks = ranks_across(across, dist.get_world_size(), shape.pipeline, shape.tensor).view(*sizes.values())
        return DeviceMesh(device.kind, ranks, mesh_dim_names=tuple(sizes))
    return init_device_mesh(device.kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def compile_layers(model: nn.Module) -> None:
    """Compile the forward of each layer, or of a model without layers.

    Each layer is compiled by itself, without its hooks, so that gathers and reductions stay outside.
    """
    for layer in layers_of(model) or [model]:
        layer.forward = torch.compile(layer.forward, backend=COMPILER)


def meet_others(config: TrainConfig, place: ProcessPlace) -> Peers | None:
    """The other islands, on the first rank of an island; None elsewhere."""
    number, num_islands, meet = place.island
    if place.rank or num_islands == 1:
        return None
    return ElasticPeers(meet, number, timeout_s=config.timeout, max_islands=num_islands, min_islands=num_islands)


def common_options(config: TrainConfig, tokens: str) -> str:
    """A hash of the options that must be equal on all islands, besides the model and the method."""
    shared = {name: value for name, value in asdict(config).items() if name not in PER_MACHINE}
    return repr((shared, tokens))


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over all trainable parameters; see `optimizer_over`."""
    assert config.optimizer is not None, "resolved by Run.of"
    return optimizer_over(config.optimizer, model, config.lr, config.weight_decay, config.seed)


def untrained(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Frozen parameters, and buffers in the model's state; the optimizer has neither."""
    params = dict(model.named_parameters(remove_duplicate=False))
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    frozen = {name: tensor for name, tensor in state.items() if name in params and not params[name].requires_grad}
    return frozen, {name: tensor for name, tensor in state.items() if name not in params}
