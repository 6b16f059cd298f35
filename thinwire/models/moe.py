"""A Mixtral-shaped mixture of experts: the model of `Llama`, whose MLP is a router and several experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.errors import ConfigError, nearest
from thinwire.models.balance import gshard_loss, importance_load_loss, summed_over_ranks
from thinwire.models.capacity import RowCounts, capacity, check_capacity
from thinwire.models.hf import HFCausalLM
from thinwire.models.llama import Linear, Llama, LlamaConfig, next_token_loss, with_gradient_of
from thinwire.models.lookahead import EXPERT_CHOICE, NOT_CAUSAL, SOFT, SoftSlots, expert_choice
from thinwire.models.noise import TokenNoise
from thinwire.models.row_hooks import RowHooks
from thinwire.table import Row

ROUTERS = ("linear", "noisy", "cosine", "sigmoid")
BALANCES = ("gshard", "importance-load")
# Of the cosine router: the temperature starts at 2, and is at most 100.
FIRST_LOG_TEMPERATURE, MOST_LOG_TEMPERATURE = math.log(2), math.log(100)


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """Sizes of a Mixtral-shaped decoder; the fields carry the names of a Hugging Face `config.json`.

    Raises ConfigError as LlamaConfig does, and for what the fields below rule out.
    """

    intermediate_size: int = 512
    """Inner width of one expert."""
    num_local_experts: int = 8
    """Experts of a layer, on all ranks together."""
    num_experts_per_tok: int = 2
    """Experts that work on one token; at most num_local_experts."""
    router_aux_loss_coef: float = 0.01
    """Weight of the loss that balances the experts, in training; 0: no such loss."""
    router: str = "linear"
    """How tokens choose experts: linear, noisy (normal noise on the logits in training), cosine (of a low-rank
    projection), or sigmoid. A layer of a model that is not causal may have expert-choice or softmoe."""
    router_noise: float = 1.0
    """Of the noisy router: the noise's standard deviation is this over num_local_experts; above 0."""
    router_rank: int = 32
    """Of the cosine router: width that tokens are projected to."""
    slots: int = 1
    """Of softmoe: slots of an expert in a sequence, each a mixture of its tokens."""
    balance: str = "gshard"
    """The loss that balances: gshard, or importance-load, which needs the noisy router."""
    norm_topk_prob: bool = True
    """Divide the weights of a token's experts by their sum. A token's only expert keeps its score."""
    weigh_inputs: bool = False
    """Multiply an expert's input by its weight, in place of its output."""
    capacity_factor: float = 0.0
    """Most rows that an expert takes of a rank's tokens, num_experts_per_tok * int(f * ceil(tokens /
    num_local_experts)), or for f < 0 the same by -f, but no more than are asked for; the rows above it are dropped. 0:
    as many as are asked for."""
    batch_priority: bool = False
    """With a capacity, the tokens with the highest scores come first, in place of the first tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_local_experts", "num_experts_per_tok", "router_noise", "router_rank", "slots"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)}: must be above zero")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok}: must be at most num_local_experts="
                f"{self.num_local_experts}; nearest is {self.num_local_experts}"
            )
        if not math.isfinite(self.capacity_factor):
            raise ConfigError(f"capacity_factor={self.capacity_factor}: must be a finite number; nearest is 0.0")
        if self.router_aux_loss_coef < 0:
            raise ConfigError(f"router_aux_loss_coef={self.router_aux_loss_coef}: must be at least 0; nearest is 0")
        for name, known in (("router", ROUTERS + NOT_CAUSAL), ("balance", BALANCES)):
            if getattr(self, name) not in known:
                hint = nearest(getattr(self, name), known) or f"; one of {', '.join(known)}"
                raise ConfigError(f"{name}={getattr(self, name)!r}: no such choice{hint}")
        if self.balance == "importance-load" and self.router != "noisy":
            raise ConfigError(
                f"balance='importance-load' needs the noise of router='noisy', not {self.router!r}; nearest: gshard"
            )

    def capacity_rows(self, num_tokens: int) -> list[Row]:
        """Rows about the capacity for a rank's number of tokens, and about what has no effect.

        Raises ConfigError for a capacity below one row.
        """
        factor, top_k, num_experts = self.capacity_factor, self.num_experts_per_tok, self.num_local_experts
        idle: list[Row] = [
            (f"{name} {getattr(self, name)}", "no effect", f"it is of router {router}, not of {self.router}")
            for name, router in (("router_noise", "noisy"), ("router_rank", "cosine"), ("slots", SOFT))
            if self.router != router and getattr(self, name) != getattr(MoEConfig, name)
        ]
        if self.norm_topk_prob and top_k == 1:
            why = "a token's only expert keeps its score: a weight that is always 1 would not train the router"
            idle.append(("norm_topk_prob True", "no effect", why))
        if not factor:
            why = "without a capacity, no row is dropped"
            return [*idle, ("batch_priority True", "no effect", why)] if self.batch_priority else idle
        limit = check_capacity(factor, num_tokens, num_experts, top_k)
        asked = f"an even router asks for {-(-num_tokens * top_k // num_experts)}; rows above are dropped, and counted"
        kept = "those of the highest scores" if self.batch_priority else "the first"
        return [
            *idle,
            (
                f"capacity_factor {factor:g}",
                f"{limit} rows of an expert, of a rank's {num_tokens} tokens: {kept}",
                asked,
            ),
        ]


@dataclass(frozen=True)
class Order:
    """The rows of experts, sorted by expert.

    Shape:
        tokens: int64 [rows], the token of each row.
        choices: int64 [rows], the row's position in the flat [tokens, k] choices.
        counts: int64 [experts], number of rows of each.
    """

    tokens: Tensor
    choices: Tensor
    counts: Tensor

    @classmethod
    def of(cls, index: Tensor, num_experts: int, priority: Tensor | None = None) -> Order:
        """The order for choices int64 [tokens, k]: an expert's rows begin with all first choices, then the second ones.

        The choice `num_experts` is no row. priority: fp32 [tokens]; among equal choices, the highest come first.
        """
        num_tokens, top_k = index.shape
        device = index.device
        tokens = torch.arange(num_tokens, device=device)
        if priority is not None:
            tokens = priority.argsort(descending=True, stable=True)
        chosen = index[tokens].t().reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=num_experts + 1)[:num_experts]
        order = order[: int(counts.sum())]
        token, choice = tokens.repeat(top_k)[order], order // max(num_tokens, 1)
        return cls(token, token * top_k + choice, counts)

    def encode(self, x: Tensor) -> Tensor:
        """The rows [rows, width] of inputs [tokens, width]."""
        return x.index_select(0, self.tokens)

    def decode(self, rows: Tensor, num_tokens: int) -> Tensor:
        """The sum [tokens, width] of each token's rows; zero for a token without one."""
        return rows.new_zeros(num_tokens, rows.shape[1]).index_add(0, self.tokens, rows)


def drop(index: Tensor, num_experts: int, limit: int, priority: Tensor | None = None) -> Tensor:
    """The choices [tokens, k], in which those after an expert's first `limit` rows become `num_experts`."""
    order = Order.of(index, num_experts, priority)
    starts = order.counts.cumsum(0) - order.counts
    places = torch.arange(len(order.choices), device=index.device) - starts.repeat_interleave(order.counts)
    flat = index.flatten().clone()
    flat[order.choices[places >= limit]] = num_experts
    return flat.view_as(index)


def loop_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The product of each expert's rows [rows, a] with its own matrix in `weights` [experts, a, b], one by one.

    Shape:
        counts: int64 [experts], number of rows of each. result: [rows, b].
    """
    blocks = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([block @ weight for block, weight in blocks])


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The same as `loop_product`, by torch's grouped kernel if it supports these tensors.

    On the CPU it has no float64, and every row must be a multiple of 16 bytes.
    """
    sizes = (rows.shape[1] * rows.element_size(), weights.shape[2] * weights.element_size())
    fits = rows.dtype in (torch.float32, torch.bfloat16) and not any(size % 16 for size in sizes)
    if not (fits and len(rows) and hasattr(F, "grouped_mm")):
        return loop_product(rows, weights, counts)
    return F.grouped_mm(rows, weights, offs=counts.cumsum(0).to(torch.int32))


class Experts(nn.Module):
    """SwiGLU experts. A range of one expert's hidden units is one range of memory in each of the three tensors.

    They are called like experts of transformers: experts(x, top_k_index, top_k_weights). row_hooks: see RowHooks.
    """

    is_sliceable = True

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts, self.weigh_inputs = config.num_local_experts, config.weigh_inputs
        self.inner, self.width = config.intermediate_size, config.hidden_size
        self.row_hooks = RowHooks()
        shape = (config.num_local_experts, self.inner, self.width)
        self.gate_proj, self.up_proj, self.down_proj = (nn.Parameter(torch.empty(shape)) for _ in range(3))

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """gate, up and down of the experts, or parts of experts, that are here, [experts, inner, hidden] each."""
        return self.gate_proj, self.up_proj, self.down_proj

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum [tokens, hidden] over each token's experts.

        Shape:
            x: [tokens, hidden].
            top_k_index: int64 [tokens, k]; `num_experts` means no expert.
            top_k_weights: [tokens, k].
        """
        work = between_ranks(self.row_hooks, self.work)
        return mixed(x, top_k_index, top_k_weights, self.num_experts, self.weigh_inputs, work)

    def work(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The result of `swiglu` with the weights of these experts.

        Shape:
            rows: [rows, hidden], sorted by expert. counts: int64 [experts], number of rows of each.
            Returns [rows, hidden].
        """
        return self.product(rows, counts, self.weights)

    def product(self, rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The same with other weights, in the form of `weights`."""
        there = self.row_hooks.run("after_dispatch", rows)
        return self.row_hooks.run("before_combine", swiglu(there, counts, weights))


def between_ranks(hooks: RowHooks, work: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Work on rows, with the hooks of the tokens' rank around it."""
    return lambda rows, counts: hooks.run("after_combine", work(hooks.run("before_dispatch", rows), counts))


def mixed(
    x: Tensor, index: Tensor, weights: Tensor, num_experts: int, weigh_inputs: bool,
    work: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """The weighted sum over each token's experts, see Experts.

    Args:
        work: (rows sorted by expert, their counts) -> the experts' outputs.

    Shape:
        x: [tokens, hidden]. index: int64 [tokens, k]. weights: [tokens, k].
    """
    order = Order.of(index, num_experts)
    of_rows = weights.flatten()[order.choices, None]
    rows = order.encode(x)
    if weigh_inputs:
        return order.decode(work((rows * of_rows).to(x.dtype), order.counts), len(x)).to(x.dtype)
    return order.decode(work(rows, order.counts) * of_rows, len(x)).to(x.dtype)


def dtype_of_work(rows: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype in which experts compute rows: autocast's, or that of their weights."""
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def swiglu(rows: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """down(silu(gate(x)) * up(x)) of rows [rows, hidden], sorted by expert.

    Shape:
        counts: int64 [experts], rows of each. weights: gate, up and down, [experts, inner, hidden] each.
    """
    dtype = dtype_of_work(rows, weights[0])
    gate, up, down = (weight.to(dtype) for weight in weights)
    rows = rows.to(dtype)
    hidden = F.silu(grouped_product(rows, gate.transpose(1, 2), counts))
    return grouped_product(hidden * grouped_product(rows, up.transpose(1, 2), counts), down, counts)


@dataclass(frozen=True)
class Choice:
    """A router's choices: index int64 [tokens, k], weights [tokens, k], sums [4, experts] for the balance loss.

    The rows of `sums`, summed over tokens: scores, first choices, the smooth load of the noisy router, and choices.
    best: the highest score of each token, [tokens].
    """

    index: Tensor
    weights: Tensor
    sums: Tensor
    best: Tensor


class Router(nn.Module):
    """Chooses k experts for each token, in fp32 or, in a model of fp64, in fp64.

    linear: softmax(x W). noisy: the same with noise / E. cosine: softmax(t cos(x P, W)). sigmoid: sigmoid(x W).
    noise: of the next forward's tokens, standard normal [tokens, experts]; None: drawn by torch's generator.
    Sources: Shazeer et al. 2017 (noisy), Chi et al. 2022 (cosine), Lewis et al. 2021 (sigmoid).
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        is_cosine = config.router == "cosine"
        width = config.router_rank if is_cosine else config.hidden_size
        self.weight = nn.Parameter(torch.empty(config.num_local_experts, width))
        self.proj = Linear(config.hidden_size, width) if is_cosine else None
        self.log_temperature = nn.Parameter(torch.empty(1)) if is_cosine else None
        self.noise: Tensor | None = None

    def forward(self, x: Tensor) -> Choice:
        """The choices for inputs [tokens, hidden]."""
        with torch.autocast(x.device.type, enabled=False):
            return self._choose(x if x.dtype == torch.float64 else x.float())

    def _choose(self, x: Tensor) -> Choice:
        config, top_k = self.config, self.config.num_experts_per_tok
        clean = logits = self._logits(x)
        deviation = config.router_noise / config.num_local_experts
        if config.router == "noisy" and self.training:
            drawn = torch.randn_like(clean) if self.noise is None else self.noise.to(clean.dtype)
            logits = clean + deviation * drawn
        scores = logits.sigmoid() if config.router == "sigmoid" else logits.softmax(-1)
        if config.router == EXPERT_CHOICE:
            return self._chosen_by_experts(scores)
        weights, index = scores.topk(top_k, dim=-1)
        best = weights[:, 0].detach()
        first = F.one_hot(index[:, 0], config.num_local_experts).to(scores.dtype)
        load = torch.zeros_like(first)
        if config.balance == "importance-load":
            # The chance that an expert is among the k if its own noise were drawn anew.
            least = logits.gather(1, index[:, -1:])
            load = torch.special.ndtr((clean - least) / deviation)
        if config.norm_topk_prob and top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        asked = torch.bincount(index.flatten(), minlength=config.num_local_experts).to(scores.dtype)
        return Choice(index, weights, torch.stack([scores.sum(0), first.sum(0), load.sum(0), asked]), best)

    def _chosen_by_experts(self, scores: Tensor) -> Choice:
        """Choices of experts, so many tokens each as an even router would give them, times the capacity factor."""
        config, num_experts = self.config, self.config.num_local_experts
        sizes = len(scores), num_experts, config.num_experts_per_tok
        index = expert_choice(scores, max(1, capacity(abs(config.capacity_factor) or 1.0, *sizes, most=len(scores))))
        asked = torch.bincount(index.flatten(), minlength=num_experts + 1)[:num_experts].to(scores.dtype)
        none = torch.zeros_like(asked)
        return Choice(index, scores, torch.stack([scores.sum(0), none, none, asked]), scores.detach().amax(-1))

    def _logits(self, x: Tensor) -> Tensor:
        if self.proj is None or self.log_temperature is None:
            return F.linear(x, self.weight.to(x.dtype))
        low = F.normalize(F.linear(x, self.proj.weight.to(x.dtype)), dim=-1)
        cosine = F.linear(low, F.normalize(self.weight.to(x.dtype), dim=-1))
        return cosine * self.log_temperature.clamp_max(MOST_LOG_TEMPERATURE).exp()


class MoE(nn.Module):
    """A router and its experts: a layer of MoELlama, or of a model of your own.

    In a model of your own, call `init_weights` once. sums: of the last forward in training, for the balance loss, see
    Choice. capacity_factor: for the next forward.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config, self.capacity_factor = config, config.capacity_factor
        soft = SoftSlots(config.num_local_experts, config.slots, config.hidden_size) if config.router == SOFT else None
        self.gate, self.experts = soft or Router(config), Experts(config)
        self.sums: Tensor | None = None

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """All matrices from N(0, 0.02^2)."""
        for name, param in self.named_parameters():
            if name.endswith("log_temperature"):
                param.fill_(FIRST_LOG_TEMPERATURE)
            else:
                param.normal_(std=0.02, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `x` [batch, seq, hidden] to the same shape."""
        if isinstance(self.gate, SoftSlots):
            return self.gate.mixed(x, self.experts)
        flat, config = x.flatten(0, -2), self.config
        choice = self.gate(flat)
        self.sums = choice.sums if self.training else None
        index = choice.index
        if self.capacity_factor and len(flat) and config.router != EXPERT_CHOICE:
            sizes = len(flat), config.num_local_experts, config.num_experts_per_tok
            limit = capacity(self.capacity_factor, *sizes, most=len(flat))
            priority = choice.best if config.batch_priority else None
            index = drop(index, config.num_local_experts, limit, priority)
        return self.experts(flat, index, choice.weights).view_as(x)


class MoELlama(Llama):
    """A Mixtral-shaped causal language model; `mixtral_weights` are those of transformers' MixtralForCausalLM.

    In training it returns the loss of the text, and its gradient also has router_aux_loss_coef times that of the
    layers' mean balance loss. So the displayed loss can be compared for any number of ranks and micro-batches.

    Attributes:
        gather: a collective that returns the sums of all ranks in training, so that the balance loss is that of the
            global batch; None: this rank's sums only.
        text_weight: what the caller multiplies the next loss by, which is not meant for the balance loss.
        draws: of a noisy router in training: a seed, and the numbers of the next forward's sequences, int64 [batch].
            What a token draws follows from them and its position, on any ranks. None: torch's generator draws a seed.
        row_counts: rows that routers have requested in training, on all ranks of `gather`; counted if there is a
            balance loss or a capacity.

    Source: Jiang et al., "Mixtral of experts" (2024).
    """

    config: MoEConfig

    def __init__(self, config: MoEConfig, seed: int = 0) -> None:
        if config.router in NOT_CAUSAL:
            raise ConfigError(
                f"router={config.router!r} chooses by tokens that come later, which a causal model can't; nearest: "
                "linear, or a layer thinwire.models.moe.MoE in a model that is not causal"
            )
        super().__init__(config, seed)
        self.gather: Callable[[Tensor], Tensor] | None = None
        self.text_weight = 1.0
        self.draws: tuple[int, Tensor] | None = None
        self.row_counts = RowCounts(config.num_experts_per_tok)

    def make_mlp(self) -> nn.Module:
        return MoE(self.config)

    def first(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        if name.endswith("log_temperature"):
            return torch.full(shape, FIRST_LOG_TEMPERATURE)
        return super().first(name, shape, generator)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        if self.training and self.config.router == "noisy":
            noise = TokenNoise.of(tokens, self.model.positions(tokens), self.draws)
            routers = [module for module in self.modules() if isinstance(module, Router)]
            for layer, router in enumerate(routers):
                # Stays until the next forward: a layer may be computed again in the backward.
                router.noise = noise.normals(layer, self.config.num_local_experts)
        logits = super().forward(tokens, None, documents)
        if targets is None:
            return logits
        return self.balanced(next_token_loss(logits, targets))

    def balanced(self, loss: Tensor) -> Tensor:
        """The loss of a text; in training, with the gradient of the last forward's balance loss."""
        if not self.training or not torch.is_grad_enabled():
            return loss
        if not self.config.router_aux_loss_coef:
            if self.capacity_factor:
                self._told(self._sums().detach())
            return loss
        return with_gradient_of(loss, self.config.router_aux_loss_coef / self.text_weight * self.balance_loss())

    @property
    def capacity_factor(self) -> float:
        """The capacity factor of the next forward, the same on all ranks. It may change from step to step."""
        return next(block.capacity_factor for block in self.modules() if isinstance(block, MoE))

    @capacity_factor.setter
    def capacity_factor(self, factor: float) -> None:
        replace(self.config, capacity_factor=factor)
        for block in self.modules():
            if isinstance(block, MoE):
                block.capacity_factor = factor

    def _sums(self) -> Tensor:
        """The sums of the last forward in training, [layers, 4, experts]."""
        return torch.stack([each.sums for each in self.modules() if isinstance(each, MoE) and each.sums is not None])

    def _told(self, sums: Tensor) -> Tensor:
        """The `sums` of all ranks, [ranks, layers, 4, experts]. Counts their rows. A collective."""
        every = sums[None] if self.gather is None else self.gather(sums)
        self.row_counts.note(every[:, 0, 1].sum(-1), every[:, :, 3], self.capacity_factor)
        return every

    def balance_loss(self) -> Tensor:
        """The mean over layers of the last forward's balance loss in training."""
        sums = summed_over_ranks(self._sums(), self._told)
        of_layers = gshard_loss(sums) if self.config.balance == "gshard" else importance_load_loss(sums)
        return of_layers.mean()


def mixtral_config(config: MoEConfig) -> dict[str, Any]:
    """Sizes for a `config.json` of transformers. Raises ConfigError for options that a Mixtral does not have."""
    plain = MoEConfig()
    if config.num_experts_per_tok == 1:
        raise ConfigError(
            "num_experts_per_tok=1: transformers' Mixtral gives a token's only expert the weight 1, here it has its "
            "score; nearest is 2"
        )
    for name in ("router", "norm_topk_prob", "weigh_inputs", "capacity_factor"):
        # In evaluation a noisy router adds no noise.
        if getattr(config, name) != getattr(plain, name) and getattr(config, name) != "noisy":
            raise ConfigError(
                f"{name}={getattr(config, name)!r}: transformers' Mixtral has only {getattr(plain, name)!r}"
            )
    own = {
        "router",
        "router_noise",
        "router_rank",
        "slots",
        "balance",
        "norm_topk_prob",
        "weigh_inputs",
        "capacity_factor",
    }
    return {name: value for name, value in asdict(config).items() if name not in own | {"batch_priority"}}


def mixtral_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a MoELlama in the names and shapes of a Mixtral's files: w1 gate, w3 up, w2 down transposed."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        prefix, is_expert, kind = name.partition(".mlp.experts.")
        if not is_expert:
            found[name.replace(".mlp.gate.", ".block_sparse_moe.gate.")] = tensor
            continue
        number = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[kind]
        for expert, weight in enumerate(tensor):
            own = weight.t().contiguous() if number == "w2" else weight
            found[f"{prefix}.block_sparse_moe.experts.{expert}.{number}.weight"] = own
    return found


def check_axes(model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Raise ConfigError for a mixture of experts on an axis that would lose its balance loss. sizes: of the axes."""
    is_ours, is_theirs = isinstance(model, MoELlama), isinstance(model, HFCausalLM) and bool(model.balance_weight)
    alone = ("pipeline", "tensor") if is_ours else ("pipeline", "sequence", "tensor")
    cut = [axis for axis in alone if sizes.get(axis, 1) > 1]
    if cut and (is_ours or is_theirs):
        near = "the data, expert and sequence axes" if is_ours else "the data and expert axes"
        raise ConfigError(
            f"a mixture of experts on a {cut[0]} axis: not supported, its balance loss is of whole "
            f"{'models' if is_ours else 'sequences and all layers'}; nearest: {near}"
        )


MIXTURES: dict[str, MoEConfig] = {
    "moe-tiny": MoEConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    ),
    "moe-demo": MoEConfig(),
}
