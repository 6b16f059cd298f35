"""The model families: the names of their sizes, and a table of roles for each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from thinwire.errors import ConfigError
from thinwire.expansion.axes import GrownAxis, Residue, layer_plan
from thinwire.expansion.roles import EmbeddingRole, GainRole, HeadRole, MatrixRole, Role, SameRole, ShiftRole

Table = tuple[tuple[str, Role | None], ...]


@dataclass(frozen=True)
class Axes:
    """The axes of a model. writes: the residual stream. reads: the part of it that layers read. q, kv: heads.

    inner: the MLP.
    """

    writes: GrownAxis
    reads: GrownAxis
    q: GrownAxis
    kv: GrownAxis
    inner: GrownAxis


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        sizes: names in config.json of width, inner width, layers, heads, key-value heads, eps.
        layer: the text before a layer's number in names.
        residue: of the residual stream; None for a model whose norms come after the sum (post-LN).
        untied: names of the output layer's tensors, each with that of the tensor it may share.
    """

    sizes: tuple[str, str, str, str, str, str]
    layer: str
    residue: Residue | None
    untied: Mapping[str, str]
    roles: Callable[[Axes], Table]


def llama_roles(axes: Axes) -> Table:
    """Roles in a Llama, Mistral or Qwen; without the layer's name. The vocabulary stays."""
    return (
        (r"model\.embed_tokens\.weight", EmbeddingRole(axes.writes)),
        (r"self_attn\.q_proj\.weight", MatrixRole(axes.q, axes.reads)),
        (r"self_attn\.[kv]_proj\.weight", MatrixRole(axes.kv, axes.reads)),
        (r"self_attn\.q_proj\.bias", ShiftRole(axes.q)),
        (r"self_attn\.[kv]_proj\.bias", ShiftRole(axes.kv)),
        (r"self_attn\.[qk]_norm\.weight", SameRole()),
        (r"self_attn\.o_proj\.weight", MatrixRole(axes.writes, axes.q, is_last=True)),
        (r"mlp\.(?:gate|up)_proj\.weight", MatrixRole(axes.inner, axes.reads)),
        (r"mlp\.(?:gate|up)_proj\.bias", ShiftRole(axes.inner)),
        (r"mlp\.down_proj\.weight", MatrixRole(axes.writes, axes.inner, is_last=True)),
        (r"(?:self_attn\.o|mlp\.down)_proj\.bias", ShiftRole(axes.writes, is_last=True)),
        (r"(?:input_layernorm|post_attention_layernorm|model\.norm)\.weight", GainRole(axes.reads)),
        (r"lm_head\.weight", HeadRole(axes.reads)),
        (r"self_attn\.rotary_emb\.inv_freq", None),
    )


def gpt2_roles(axes: Axes) -> Table:
    """Roles in a GPT-2, whose matrices lie as [in, out], and whose queries, keys and values are one matrix."""
    qkv = replace(axes.q, parts=3)
    return (
        (r"transformer\.w[tp]e\.weight", EmbeddingRole(axes.writes)),
        (r"attn\.c_attn\.weight", MatrixRole(qkv, axes.reads, is_transposed=True)),
        (r"attn\.c_attn\.bias", ShiftRole(qkv)),
        (r"attn\.c_proj\.weight", MatrixRole(axes.writes, axes.q, is_transposed=True, is_last=True)),
        (r"mlp\.c_fc\.weight", MatrixRole(axes.inner, axes.reads, is_transposed=True)),
        (r"mlp\.c_fc\.bias", ShiftRole(axes.inner)),
        (r"mlp\.c_proj\.weight", MatrixRole(axes.writes, axes.inner, is_transposed=True, is_last=True)),
        (r"(?:attn|mlp)\.c_proj\.bias", ShiftRole(axes.writes, is_last=True)),
        (r"(?:ln_[12]|transformer\.ln_f)\.weight", GainRole(axes.reads)),
        (r"(?:ln_[12]|transformer\.ln_f)\.bias", ShiftRole(axes.reads)),
        (r"lm_head\.weight", HeadRole(axes.reads)),
        (r"attn\.(?:masked_)?bias", None),
    )


def bert_roles(axes: Axes) -> Table:
    """Roles in a BERT, whose norms come after the sum: every vector of the width is whole copies."""
    wide = axes.writes
    return (
        (r"bert\.embeddings\.(?:word|position|token_type)_embeddings\.weight", EmbeddingRole(wide)),
        (r"attention\.self\.(?:query|key|value)\.weight", MatrixRole(axes.q, wide)),
        (r"attention\.self\.(?:query|key|value)\.bias", ShiftRole(axes.q)),
        (r"attention\.output\.dense\.weight", MatrixRole(wide, axes.q)),
        (r"intermediate\.dense\.weight", MatrixRole(axes.inner, wide)),
        (r"intermediate\.dense\.bias", ShiftRole(axes.inner)),
        (r"output\.dense\.weight", MatrixRole(wide, axes.inner)),
        (r"(?:bert\.pooler|cls\.predictions\.transform)\.dense\.weight", MatrixRole(wide, wide)),
        (r"(?:(?:attention\.)?output|bert\.pooler|cls\.predictions\.transform)\.dense\.bias", ShiftRole(wide)),
        (r"(?:bert\.embeddings|(?:attention\.)?output|cls\.predictions\.transform)\.LayerNorm\.weight", GainRole(wide)),
        (r"(?:bert\.embeddings|(?:attention\.)?output|cls\.predictions\.transform)\.LayerNorm\.bias", ShiftRole(wide)),
        (r"(?:cls\.seq_relationship|cls\.predictions\.decoder|classifier)\.weight", HeadRole(wide)),
        (r"(?:cls\.seq_relationship|cls\.predictions|cls\.predictions\.decoder|classifier)\.bias", SameRole()),
        (r"bert\.embeddings\.position_ids", None),
    )


LLAMA = Family(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
     "rms_norm_eps"),
    r"model\.layers\.", "zero", {"lm_head.weight": "model.embed_tokens.weight"}, llama_roles,
)  # fmt: skip
GPT2 = Family(
    ("n_embd", "n_inner", "n_layer", "n_head", "n_head", "layer_norm_epsilon"),
    r"transformer\.h\.", "average", {"lm_head.weight": "transformer.wte.weight"}, gpt2_roles,
)  # fmt: skip
BERT = Family(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_attention_heads",
     "layer_norm_eps"),
    r"bert\.encoder\.layer\.", None,
    {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    bert_roles,
)  # fmt: skip
# Parts of the names of models that tell classes of a text, or of its words.
CLASSIFIERS = "ForSequenceClassification|ForTokenClassification|ForNextSentencePrediction"
FAMILIES = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gpt2": GPT2, "bert": BERT}


@dataclass(frozen=True)
class Growth:
    """A model and its larger form: family, both settings (config.json), axes, and layers."""

    family: Family
    small: Mapping[str, Any]
    large: Mapping[str, Any]
    axes: Axes
    layers: tuple[tuple[int, bool], ...]

    @classmethod
    def of(
        cls,
        settings: Mapping[str, Any],
        hidden_size: int | None,
        layers: int | None,
        intermediate_size: int | None = None,
    ) -> Growth:
        """Read the sizes and check the new ones. None: unchanged.

        The inner width then grows in proportion to the width.

        Raises ConfigError for a family without a table, and for sizes that no lossless model has.
        """
        kind = settings.get("model_type")
        if kind not in FAMILIES:
            raise ConfigError(f"a model of the family {kind} can't be expanded; choose one of {', '.join(FAMILIES)}")
        family = FAMILIES[kind]
        for name in settings.get("architectures") or []:
            if family is BERT and not re.search(f"LM|ForPreTraining|{CLASSIFIERS}", name):
                raise ConfigError(f"{name} can't be compared with a larger one on text; nearest: BertForMaskedLM")
        width, inner, depth, heads, kv_heads, eps = family.sizes
        old, old_layers, num_heads = (int(settings[name]) for name in (width, depth, heads))
        groups = int(settings.get(kv_heads) or num_heads)
        head_size = int(settings.get("head_dim") or old // num_heads)
        old_inner = int(settings.get(inner) or 4 * old)
        new, new_layers = hidden_size or old, layers or old_layers
        check_width(family, settings, old, new, groups)
        check_depth(family, settings, old_layers, new_layers)
        new_inner = intermediate_size or round(old_inner * new / old)
        if new_inner < old_inner:
            raise ConfigError(f"--intermediate-size {new_inner}: must be at least {old_inner}, which is the nearest")
        new_groups, share = groups * new // old, num_heads // groups
        residual = GrownAxis(old, new, family.residue or "zero")
        axes = Axes(
            writes=residual,
            reads=replace(residual, residue="zero"),
            q=GrownAxis(num_heads * head_size, new_groups * share * head_size, unit=share * head_size),
            kv=GrownAxis(groups * head_size, new_groups * head_size, unit=head_size),
            inner=GrownAxis(old_inner, new_inner),
        )
        plan = tuple(layer_plan(old_layers, new_layers))
        large = dict(settings) | {
            width: new, inner: new_inner, depth: new_layers, kv_heads: new_groups, heads: new_groups * share,
            eps: float(settings[eps]) * axes.reads.kappa, "tie_word_embeddings": False,
        }  # fmt: skip
        if family is LLAMA:
            large["head_dim"] = head_size
        if isinstance(kinds := settings.get("layer_types"), list):
            large["layer_types"] = [kinds[layer] for layer, _ in plan]
        return cls(family, settings, large, axes, plan)

    @property
    def has_head(self) -> bool:
        """Whether the model ends with an output layer over the vocabulary."""
        return any(re.search("LM|ForPreTraining", name) for name in self.small.get("architectures") or [])

    @property
    def is_classifier(self) -> bool:
        """Whether the outputs are classes, so that the model has no loss of words."""
        return any(re.search(CLASSIFIERS, name) for name in self.small.get("architectures") or [])

    def targets(self, name: str) -> Iterator[tuple[str, Role, bool]]:
        """The tensors of the large model that come from `name` in the small one: name, role, whether inserted.

        Raises ConfigError for a name without a role.
        """
        match = re.fullmatch(rf"({self.family.layer})(\d+)\.(.+)", name)
        role = role_of(self.family.roles(self.axes), match[3] if match else name, name)
        if role is None:
            return
        if match is None:
            yield name, role, False
            return
        begin, end = match.span(2)
        for number, (layer, is_inserted) in enumerate(self.layers):
            if layer == int(match[2]):
                yield f"{name[:begin]}{number}{name[end:]}", role, is_inserted


def role_of(table: Table, name: str, whole_name: str) -> Role | None:
    """The role of a name. Raises ConfigError for an unknown one."""
    for pattern, role in table:
        if re.fullmatch(pattern, name):
            return role
    raise ConfigError(f"no role for {whole_name}: the model has a part that its family's table does not know")


def check_width(family: Family, settings: Mapping[str, Any], old: int, new: int, groups: int) -> None:
    """Raise ConfigError for a width that no model with the same outputs has, with the nearest that one has."""
    if new < old:
        raise ConfigError(f"--hidden-size {new}: a model grows, so at least {old}, which is the nearest")
    # Heads keep their size, and those that share keys and values grow together.
    unit, why = old // math.gcd(old, groups), f"{groups} groups of heads grow in whole groups"
    if family.residue is None or settings["model_type"] == "qwen3":
        unit, why = old, "its norms come after the sum" if family.residue is None else "norms of heads share its eps"
    if new % unit:
        nearest = max(old, round(new / unit) * unit)
        raise ConfigError(f"--hidden-size {new}: must be a multiple of {unit}, since {why}; nearest: {nearest}")


def check_depth(family: Family, settings: Mapping[str, Any], old: int, new: int) -> None:
    """Raise ConfigError for a depth that no model with the same outputs has, with the nearest that one has."""
    if not old <= new <= 2 * old:
        raise ConfigError(f"--layers {new}: must be from {old} to {2 * old}; nearest: {min(max(new, old), 2 * old)}")
    fixed = "its norms come after the sum, and change their input even where a layer adds nothing"
    if settings.get("scale_attn_by_inverse_layer_idx"):
        fixed = "its attention is divided by the layer's number"
    elif family.residue is not None:
        return
    if new != old:
        raise ConfigError(f"--layers {new}: must stay {old}, since {fixed}; nearest: {old}")
