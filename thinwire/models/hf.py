from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from thinwire.errors import ConfigError, nearest
from thinwire.models.balance import balance_of, joined_loss, joined_sums, joins_layers, summed_over_ranks
from thinwire.models.kept import PACKED, is_pruned, keep_folder, read_packed
from thinwire.models.llama import next_token_loss, with_gradient_of
from thinwire.table import Row
from thinwire.tiers.tensor_file import StoredTensors

log = logging.getLogger(__name__)
# What models of transformers call the weight of their balance loss, or their configurations.
WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")


class HFCausalLM(nn.Module):
    """A transformers causal LM behind the contract of `Llama`: forward(tokens, targets) and `max_seq_len`.

    gather: of a mixture, a collective that returns the sums of all ranks in training, so that the balance loss is that
    of the global batch; None: this rank's sums only.
    """

    model: Any  # a transformers.PreTrainedModel, which is optional here

    def __init__(self, model: nn.Module, max_seq_len: int) -> None:
        super().__init__()
        self.model = model
        self.max_seq_len = max_seq_len
        self.gather: Callable[[Tensor], Tensor] | None = None
        # Asked for in each forward.
        self._has_routers = has_routers(model)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, a tied weight counted once."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, seq, vocab] of tokens [batch, seq], or the mean fp32 loss if targets are given.

        In training, the gradient of a mixture of experts has router_aux_loss_coef times that of transformers' balance
        loss too; the loss is that of the text.
        """
        if targets is None or not self.training or not torch.is_grad_enabled() or not self.balance_weight:
            found = self.model(input_ids=tokens, use_cache=False)
            # A model with a second output, of pairs of sentences, calls that of words so.
            logits = found.prediction_logits if "prediction_logits" in found else found.logits
            return logits if targets is None else next_token_loss(logits, targets)
        found = self.model(input_ids=tokens, use_cache=False, output_router_logits=True)
        return with_gradient_of(next_token_loss(found.logits, targets), self.balance_weight * self._balance_loss(found))

    def _balance_loss(self, found: Any) -> Tensor:
        """The balance loss of transformers for the last forward; with `gather`, over the tokens of all ranks."""
        if self.gather is None or not joins_layers(self.model):
            return found.aux_loss
        sums = summed_over_ranks(joined_sums(self.model, found.router_logits), self.gather)
        return joined_loss(sums, self.model.num_experts_per_tok)

    @property
    def balance_weight(self) -> float:
        """The weight of the balance loss, by any of the names it has in transformers; 0 for a model without one."""
        return self._stated_weight if balance_of(self.model) is not None else 0.0

    @property
    def _stated_weight(self) -> float:
        if not self._has_routers or not hasattr(self.model.config, "output_router_logits"):
            return 0.0
        stated = (getattr(of, name, None) for of in (self.model.config, self.model) for name in WEIGHTS)
        return next((float(weight) for weight in stated if weight is not None), 0.0)

    def balance_rows(self) -> list[Row]:
        """A row about a balance loss that can't be taken over all ranks."""
        if (stated := self._stated_weight) and not self.balance_weight:
            return [
                (f"balance loss, weight {stated:g}", "none", f"{type(self.model).__name__} of transformers has none")
            ]
        if not self.balance_weight or joins_layers(self.model):
            return []
        why = f"{type(self.model).__name__} has a form of its own, which sums of ranks do not give"
        return [(f"balance loss, weight {self.balance_weight:g}", "of each rank's own tokens", why)]


def has_routers(model: nn.Module) -> bool:
    """Whether any layer is a mixture: a configuration of one may have dense layers alone."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return any(name == "gate" or "router" in name or "expert" in name for name in names)


def build_hf(
    folder: str, vocab_size: int, seq_len: int, seed: int, overrides: Mapping[str, int | float | bool | str]
) -> HFCausalLM:
    """The causal LM of a local folder: with its safetensors weights if present, else with fresh weights of this seed.

    Reads nothing from the network, runs no code from the folder, opens no pickle. Raises ConfigError on errors.
    """
    config = check_hf(folder, vocab_size, seq_len, overrides)
    import transformers

    path = Path(folder).expanduser()
    with explained(folder), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = load(transformers, path, config) if look_into(path) else fresh(transformers, config)
    model.float()
    keep_folder(model, path)
    return HFCausalLM(model, longest(config) or seq_len)


def skeleton_hf(
    folder: str, vocab_size: int, seq_len: int, overrides: Mapping[str, int | float | bool | str]
) -> HFCausalLM:
    """The model of `build_hf` without memory for its weights, on the device "meta". Raises the same ConfigErrors."""
    config = check_hf(folder, vocab_size, seq_len, overrides)
    import transformers

    with explained(folder), torch.device("meta"):
        model = fresh(transformers, config)
    keep_folder(model, Path(folder).expanduser())
    return HFCausalLM(model, longest(config) or seq_len)


def shapes_hf(
    folder: str, vocab_size: int, seq_len: int, overrides: Mapping[str, int | float | bool | str]
) -> HFCausalLM:
    """The model of `build_hf` with parameters on the device "meta", whose buffers have the values of a new model.

    A pruned folder's matrices are whole. Raises the same ConfigErrors.
    """
    config = check_hf(folder, vocab_size, seq_len, overrides)
    import transformers

    with explained(folder), torch.random.fork_rng(), parameters_on_meta():
        model = fresh(transformers, config)
    return HFCausalLM(model.train(), longest(config) or seq_len)


def hollow_hf(
    folder: str, vocab_size: int, seq_len: int, overrides: Mapping[str, int | float | bool | str]
) -> tuple[HFCausalLM | None, StoredWeights | None, str]:
    """The model of `build_hf` with parameters on the device "meta", what reads them, and nothing; or why there is none.

    Only a folder that holds all weights, each under its own name, gives them one by one. Raises the same ConfigErrors.
    """
    made = shapes_hf(folder, vocab_size, seq_len, overrides)
    kinds = {name: param.dtype for name, param in made.model.named_parameters()}
    if why := why_whole_hf(folder, kinds):
        return None, None, why
    stored = StoredWeights(Path(folder).expanduser(), kinds)
    stored.fill_buffers(made.float().model)
    return made, stored, ""


def why_whole_hf(folder: str, names: Iterable[str]) -> str:
    """Why a folder does not give its weights one by one; empty: it does. names: of weights in transformers."""
    path = Path(folder).expanduser()
    if not look_into(path):
        return "transformers draws the first weights of a model all at once"
    if is_pruned(path):
        return "its matrices are pruned"
    missing = StoredWeights(path, dict.fromkeys(names, torch.float32)).missing
    return f"{len(missing)} weights have another name in its files: {missing[0]}" if missing else ""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which modules get parameters without memory. Buffers have their values: few files hold them."""
    register = nn.Module.register_parameter

    def without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class StoredWeights:
    """The weights in a folder's safetensors files, read one by one when they are asked for.

    missing: names of weights that no file has.
    """

    def __init__(self, folder: Path, kinds: Mapping[str, torch.dtype]) -> None:
        """kinds: in which dtype the model has each weight, by its name in transformers; they are read as fp32."""
        self._files: dict[str, StoredTensors] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = StoredTensors(path)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"model hf:{folder}: its weights can't be loaded: {first_line(error)}") from error
            self._files |= dict.fromkeys(file.shapes, file)
        self._kinds = kinds
        self.missing = [name for name in kinds if name not in self._files]

    def __call__(self, name: str) -> Tensor:
        """A weight by its name in HFCausalLM."""
        own = name.removeprefix("model.")
        return self._files[own].read(own).to(self._kinds[own]).float()

    def are_all_of(self, shapes: Mapping[str, torch.Size]) -> bool:
        """Whether the files hold tensors of these names and shapes, and no others."""
        return shapes == {name: file.shapes[name] for name, file in self._files.items()}

    @torch.no_grad()
    def fill_buffers(self, model: nn.Module) -> None:
        """Copy the buffers that lie in the files."""
        for name, buffer in model.named_buffers():
            if name in self._files:
                buffer.copy_(self._files[name].read(name))


def check_hf(folder: str, vocab_size: int, seq_len: int, overrides: Mapping[str, int | float | bool | str]) -> Any:
    """The folder's transformers config, checked without building the model. Raises ConfigError."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"model hf:{folder}: needs transformers; pip install -e '.[hf]' in thinwire's folder"
        ) from None
    path = Path(folder).expanduser()
    look_into(path)
    with explained(folder):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        apply_overrides(config, overrides)
        check_sizes(folder, config, vocab_size, seq_len)
    return config


@contextmanager
def explained(folder: str) -> Iterator[None]:
    """Turn errors of transformers into a ConfigError of one line."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise ConfigError(f"model hf:{folder}: transformers cannot build it: {first_line(error)}") from error


def look_into(path: Path) -> bool:
    """Whether the folder holds weights. ConfigError if it is not a model folder, or has weights only as pickles."""
    if not path.is_dir():
        siblings = [f"hf:{file.parent}" for file in path.parent.glob("*/config.json")]
        close = (
            nearest(f"hf:{path}", siblings)
            if siblings
            else "; give a folder with config.json and its weights, or a preset"
        )
        raise ConfigError(f"model hf:{path}: no such folder{close}")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model hf:{path}: the folder has no config.json")
    refuse_pickles(path)
    return any(path.glob("*.safetensors"))


def refuse_pickles(path: Path) -> None:
    """Raise ConfigError, with a way to convert them, if a folder's only weights are pickles."""
    pickles = sorted(file for ending in ("bin", "pt", "pth") for file in path.glob(f"*.{ending}"))
    if pickles and not any(path.glob("*.safetensors")):
        convert = f"AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained('NEW')"
        raise ConfigError(
            f"{pickles[0]} is a pickle, which can run code when it is opened, so it is refused; if you trust the file, "
            f'write .safetensors with transformers: python -c "import transformers as t; t.{convert}"'
        )


def apply_overrides(config: Any, overrides: Mapping[str, int | float | bool | str]) -> None:
    """Sets fields of a transformers config; ConfigError if it has no such field."""
    known = config.to_dict()
    for key, value in overrides.items():
        if key not in known:
            raise ConfigError(f"model option {key!r}: {config.model_type} has no such field{nearest(key, known)}")
        setattr(config, key, value)


def longest(config: Any) -> int | None:
    """The context length of a transformers config, None if the architecture has no limit."""
    return getattr(config, "max_position_embeddings", None)


def check_sizes(folder: str, config: Any, vocab_size: int, seq_len: int) -> None:
    """ConfigError if the tokenizer has more tokens than the model, or a sequence more positions."""
    if config.vocab_size < vocab_size:
        raise ConfigError(
            f"model hf:{folder}: its vocabulary of {config.vocab_size} is smaller than the tokenizer's {vocab_size}; "
            f"use the model's own tokenizer.json, or set vocab_size to {vocab_size}"
        )
    limit = longest(config)
    if limit is not None and limit < seq_len:
        raise ConfigError(
            f"--seq-len {seq_len}: model hf:{folder} holds at most {limit} tokens; nearest: --seq-len {limit}"
        )


def fresh(transformers: Any, config: Any) -> nn.Module:
    """A model with random weights from the global seed."""
    return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def load(transformers: Any, path: Path, config: Any) -> nn.Module:
    """A model with the folder's weights. Missing weights are reported. ConfigError for damaged or unfitting files."""
    try:
        if (path / PACKED).is_file():
            model = fresh(transformers, config).float()
            read_packed(model, path)
            return model.train()
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"model hf:{path}: its weights can't be loaded: {first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        log.warning(
            "model hf:%s: %d weights are not in the folder and start at random: %s",
            path,
            len(missing),
            ", ".join(missing[:5]),
        )
    return model.train()


def first_line(error: Exception) -> str:
    """First line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
