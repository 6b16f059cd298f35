"""Distillation by experts: a student's experts learn the outputs of its teacher's experts for the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.models.llama import with_gradient_of


@dataclass(frozen=True)
class Lesson:
    """The work of one layer of the teacher.

    Shape:
        rows: [choices, hidden], its tokens, each once for each of its experts.
        experts: int64 [choices], the expert of each row.
        results: [choices, hidden], the outputs of the teacher's experts.
    """

    rows: Tensor
    experts: Tensor
    results: Tensor

    @classmethod
    def of(cls, module: nn.Module, x: Tensor, index: Tensor) -> Lesson:
        """The lesson of a teacher's experts, called with tokens [tokens, hidden] and choices int64 [tokens, k]."""
        rows, experts = x.repeat_interleave(index.shape[1], 0), index.flatten()
        return cls(rows, experts, apart(module, rows, experts))

    def error(self, student: nn.Module) -> Tensor:
        """The sum over experts of the mean squared error of the student's outputs, a scalar."""
        off = apart(student, self.rows, self.experts) - self.results
        squares = off.to(torch.promote_types(off.dtype, torch.float32)).square().mean(-1)
        num = experts_of(student) + 1
        # One more than there are stands for none.
        counts = torch.bincount(self.experts, minlength=num).clamp(min=1)
        return (squares.new_zeros(num).index_add(0, self.experts, squares) / counts)[:-1].sum()


def apart(module: nn.Module, rows: Tensor, experts: Tensor) -> Tensor:
    """The output of each row's expert, with weight 1. Hooks of the module do not run.

    Shape:
        rows: [rows, hidden]. experts: int64 [rows], the expert of each row. Returns [rows, hidden].
    """
    return module.forward(rows, experts[:, None], rows.new_ones(len(rows), 1))


class Distillation:
    """Adds to a student's loss, in training, the error of its experts compared with its teacher's.

    With x the inputs of layer l in the teacher, and its routing: L = L_text + w sum_l sum_e MSE(S_le(x), T_le(x)).
    The displayed loss is L_text; the gradient is that of L. weight: w; None: chosen in the first step as L_text / sum,
    so that both parts are equal there.

    Args:
        student: a mixture whose experts are called as experts(x, top_k_index, top_k_weights). Its `forward` is
            replaced.
        teacher: a mixture with as many layers, experts and hidden units; it is not trained.

    Raises ConfigError for models whose experts do not match.
    Source: Xie et al., "MoE-Pruner" (2024), section 3.3; the routing is the teacher's, which the paper leaves open.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, weight: float | None = None) -> None:
        self.weight = weight
        self._taken: list[Tensor] = []
        check_alike(student, teacher)
        self._students, self._teachers = expert_modules(student), expert_modules(teacher)
        self._teacher = teacher.eval().requires_grad_(False)
        own = student.forward

        def forward(tokens: Tensor, targets: Tensor | None = None) -> Tensor:
            if targets is None or not student.training or not torch.is_grad_enabled():
                return own(tokens) if targets is None else own(tokens, targets)
            assert self.weight is not None, "the weight of the teacher's part is set before training"
            with self._taught(tokens) as errors:
                loss = own(tokens, targets)
            taught = self.weight * torch.stack(errors).sum()
            self._taken.append(taught.detach())
            return with_gradient_of(loss, taught)

        student.forward = forward
        self._student = student

    def take(self) -> float:
        """The mean of w times the errors over the forwards in training since the last call."""
        taken, self._taken = self._taken, []
        return float(torch.stack(taken).mean())

    @torch.no_grad()
    def parts(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """L_text and the sum of errors of a batch, two scalars without gradient.

        Shape:
            tokens, targets: int64 [batch, tokens].
        """
        with self._taught(tokens) as errors:
            loss = self._student(tokens, targets)
        return loss, torch.stack(errors).sum()

    @contextmanager
    def _taught(self, tokens: Tensor) -> Iterator[list[Tensor]]:
        """Context in which each of the student's layers adds its error on these tokens to the list."""
        lessons, errors = self._lessons(tokens), list[Tensor]()
        with ExitStack() as hooks:
            for module, lesson in zip(self._students, lessons, strict=True):
                # Inside of the forward: the host has the weights there, and nowhere else.
                def compare(module: nn.Module, *_: Any, lesson: Lesson = lesson) -> None:
                    errors.append(lesson.error(module))

                hooks.callback(module.register_forward_hook(compare).remove)
            yield errors

    @torch.no_grad()
    def _lessons(self, tokens: Tensor) -> list[Lesson]:
        calls: list[tuple[Tensor, Tensor]] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x, index = (*args, *kwargs.values())[:2]
            calls.append((x, index))

        with ExitStack() as hooks:
            for each in self._teachers:
                hooks.callback(each.register_forward_pre_hook(note, with_kwargs=True).remove)
            self._teacher(tokens)
        return [Lesson.of(each, *call) for each, call in zip(self._teachers, calls, strict=True)]


def check_alike(student: nn.Module, teacher: nn.Module) -> None:
    """Raise ConfigError for a teacher whose experts do not match the student's."""
    shapes = [[tuple(map(int, sizes(each))) for each in expert_modules(model)] for model in (student, teacher)]
    if shapes[0] != shapes[1] or not shapes[0]:
        said = [f"{len(each)} layer(s) of experts" + (f" {each[0]}" if each else "") for each in shapes]
        raise ConfigError(
            f"--teacher: the model has {said[0]} (experts, hidden size) and its teacher {said[1]}: they must be "
            "alike; nearest: the folder that the model was pruned from"
        )


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The experts of each layer, packed like thinwire's and those of transformers 5."""
    named = model.named_modules()
    return [each for name, each in named if name.rpartition(".")[2] == "experts" and hasattr(each, "down_proj")]


def experts_of(module: Any) -> int:
    """Number of experts of a layer."""
    return int(module.down_proj.shape[0])


def sizes(module: Any) -> Sequence[int]:
    """Number of experts of a layer, and the width of its rows."""
    down = module.down_proj
    return len(down), down.shape[2] if hasattr(module, "up_proj") else down.shape[1]
