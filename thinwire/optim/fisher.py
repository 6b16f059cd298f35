"""The inverse of damped empirical Fisher matrices: what m gradients say of curvature, without a d x d matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.errors import ConfigError

# Columns that are converted to fp64 at once.
PAGE = 1 << 16


class InverseFisher:
    """F^-1 of F = damping I + (1/m) G^T G, for the m gradients that are the rows of G [..., m, d].

    By the Woodbury identity, with K = m damping I + G G^T = L L^T, which is m x m:

        F^-1 x = (x - G^T K^-1 G x) / damping        F^-1 g_i = m G^T K^-1 e_i
        [F^-1]_ab = [a = b] / damping - v_a . v_b    for the columns v of V = L^-1 G / sqrt(damping)

    The second form is the first one without its cancellation. K, its factor and all sums are fp64; G is read a page of
    columns at a time, so that it may be a mapped file. Leading dimensions are blocks: a matrix F for each. To make it
    takes O(d m^2), a product O(d m), an element O(m^2).

    Args:
        rows: G; it is not copied.
        damping: above 0.
        gram: G G^T, fp64 [..., m, m], where it is known.
        page: columns of a page.

    Raises ConfigError for a damping that is not above 0.
    Source: Frantar, Kurtic and Alistarh, "M-FAC: Efficient matrix-free approximations of second-order information"
    (NeurIPS 2021), section 3; the identity in place of its recursion.
    """

    def __init__(self, rows: Tensor, damping: float, *, gram: Tensor | None = None, page: int = PAGE) -> None:
        if not damping > 0:
            raise ConfigError(f"damping {damping}: must be above 0; the usual: 1e-5")
        self.rows, self.damping, self.page = rows, damping, page
        gram = sum_of_squares(rows, page) if gram is None else gram
        count = rows.shape[-2]
        damped = gram + count * damping * torch.eye(count, dtype=torch.float64, device=gram.device)
        self.factor = torch.linalg.cholesky(damped)

    def product(self, x: Tensor) -> Tensor:
        """F^-1 x, [..., d] as x."""
        weights = self._solved(products(self.rows, x, self.page).unsqueeze(-1)).squeeze(-1)
        return (x - combined(self.rows, weights, self.page)) / self.damping

    def of_row(self, row: int) -> Tensor:
        """F^-1 of the gradient number `row`, [..., d]."""
        return combined(self.rows, self.row_weights(row), self.page)

    def row_weights(self, row: int) -> Tensor:
        """The weights c, fp64 [..., m], with F^-1 g = G^T c of the gradient number `row`."""
        one = torch.zeros(*self.factor.shape[:-1], 1, dtype=torch.float64, device=self.factor.device)
        one[..., row, :] = self.factor.shape[-1]
        return self._solved(one).squeeze(-1)

    def diagonal(self) -> Tensor:
        """The diagonal of F^-1, [..., d]."""
        found = torch.empty(self.rows.shape[:-2] + self.rows.shape[-1:], dtype=self.rows.dtype, device=self.rows.device)
        for page in pages(self.rows, self.page):
            found[..., page] = (1 / self.damping - self._columns(page).square().sum(-2)).to(found.dtype)
        return found

    def elements(self, a: Tensor, b: Tensor) -> Tensor:
        """[F^-1]_ab, fp64 [..., number], for two lists of indices, int64 [number]."""
        same = (a == b).double() / self.damping
        return same - (self._columns(a) * self._columns(b)).sum(-2)

    def _columns(self, index: slice | Tensor) -> Tensor:
        """Columns of V."""
        solved = torch.linalg.solve_triangular(self.factor, self.rows[..., index].double(), upper=False)
        return solved / self.damping**0.5

    def _solved(self, values: Tensor) -> Tensor:
        """K^-1 of columns."""
        return torch.cholesky_solve(values, self.factor)


def products(rows: Tensor, x: Tensor, page: int = PAGE) -> Tensor:
    """G x, fp64 [..., m]."""
    total = torch.zeros(rows.shape[:-1], dtype=torch.float64, device=rows.device)
    for columns in pages(rows, page):
        total += (rows[..., columns].double() @ x[..., columns].double().unsqueeze(-1)).squeeze(-1)
    return total


def combined(rows: Tensor, weights: Tensor, page: int = PAGE) -> Tensor:
    """G^T c, [..., d] as G; weights: c, fp64 [..., m]."""
    found = torch.empty(rows.shape[:-2] + rows.shape[-1:], dtype=rows.dtype, device=rows.device)
    column = weights.to(rows.device).unsqueeze(-1)
    for columns in pages(rows, page):
        found[..., columns] = (rows[..., columns].double().mT @ column).squeeze(-1).to(found.dtype)
    return found


def sum_of_squares(rows: Tensor, page: int = PAGE) -> Tensor:
    """G G^T, fp64 [..., m, m]."""
    total = torch.zeros(*rows.shape[:-1], rows.shape[-2], dtype=torch.float64, device=rows.device)
    for columns in pages(rows, page):
        part = rows[..., columns].double()
        total += part @ part.mT
    return total


def pages(rows: Tensor, page: int) -> Iterator[slice]:
    """The columns of each page."""
    for first in range(0, rows.shape[-1], page):
        yield slice(first, first + page)
