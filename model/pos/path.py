"""PaTH attention (Yang et al. 2025, arXiv 2505.16381): each token turns all earlier keys by a factor that it computes.

The score of query i and key j is q_i . H_i H_(i-1) .. H_(j+1) k_j / sqrt(D), with H_t = 1 - beta_t w_t w_t^T, a unit
vector w_t = W_2 W_1 x_t / |..| and beta_t = 2 sigmoid(b . x_t + c) for each head. Left out: the short convolution of w
(3 tokens) and the forget gate. Where query heads share keys (n_kv_heads), the authors' share w, too; ours do not.

The product of the n factors of a chunk is 1 - W^T X, where the rows of W are its w and X solves a triangular system:
(1 + strictly lower part of B W W^T) X = B W, B = diag(beta). The same system gives the products that begin or end
inside of the chunk (their appendix, fla's naive.py).

Scores are a mask, of a block of queries at a time: memory is linear in T.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import check
from model import attention
from model.attention import Heads, Where, softcapped
from model.masks import ScoreBias
from model.pos import Encoding, Shape

CHUNK = 64  # tokens whose factors are multiplied by one triangular system


def path_scores(q: Tensor, k: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """q_i . H_i .. H_(j+1) k_j of the last S queries and all T keys, [B, H, S, T]; of later keys any finite number.

    q: [B, H, S, D]. k, w: [B, H, T, D]. beta: [B, H, T, 1].
    """
    S, T = q.shape[2], k.shape[2]
    # Zeros before the first token make whole chunks: their factors are 1
    q, k, w, beta = (F.pad(x, (0, 0, -x.shape[2] % CHUNK, 0)).unflatten(2, (-1, CHUNK)) for x in (q, k, w, beta))
    before = k.shape[2] - q.shape[2]  # chunks without queries
    u = beta * w
    solved = torch.cat((u, (u @ k.mT).tril(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(u @ w.mT, solved, upper=False, unitriangular=True)
    of_chunk, from_key = solved.split((w.shape[-1], CHUNK), dim=-1)  # for whole chunks, and from each key on
    last_k = k - from_key.mT @ w  # keys as the last token of their chunk sees them
    q_dot_w = (q @ w[:, :, before:].mT).tril()
    inside = q @ k[:, :, before:].mT - q_dot_w @ from_key[:, :, before:]  # scores within a chunk
    first_q = q - q_dot_w @ of_chunk[:, :, before:]  # queries at the start of their chunk
    # moved: the queries of chunks after c, moved to the end of chunk c
    moved, columns = q[:, :, :0].flatten(2, 3), []
    for c in reversed(range(k.shape[2])):
        column = moved @ last_k[:, :, c].mT
        moved = moved - moved @ w[:, :, c].mT @ of_chunk[:, :, c]
        if c >= before:
            column = torch.cat((inside[:, :, c - before], column), dim=2)
            moved = torch.cat((first_q[:, :, c - before], moved), dim=2)
        columns.append(F.pad(column, (0, 0, q.shape[2] * CHUNK - column.shape[2], 0)))
    return torch.cat(columns[::-1], dim=-1)[..., -S:, -T:]


@dataclass
class PathScores(ScoreBias):
    """The scores, in float32 at least, for queries of zeros, whose own scores are 0."""

    heads: Heads
    w: Tensor  # [B, H, T, D]
    beta: Tensor  # [B, H, T, 1]
    hidden_between: bool  # a query does not see all keys between two that it sees

    def bias(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        # Keys that are hidden from all of these queries turn earlier ones, too
        index = torch.arange(int(q_index[-1]) + 1, device=q_index.device) if self.hidden_between else k_index
        q, k = self.heads.wide(q_index, index)
        with torch.autocast(q.device.type, enabled=False):
            scores = path_scores(q, k, self.w[:, :, index], self.beta[:, :, index]) * q.shape[-1] ** -0.5
        scores = softcapped(scores, self.heads.softcap)
        return scores[..., k_index] if self.hidden_between else scores


class Householder(nn.Module):
    """The factors of one layer, initialised as in the authors' code: standard deviation 0.02, c = 0."""

    def __init__(self, shape: Shape, rank: int):
        super().__init__()
        self.down = nn.Linear(shape.width, rank, bias=False)
        self.up = nn.Linear(rank, shape.n_heads * shape.head_dim, bias=False)
        self.beta = nn.Linear(shape.width, shape.n_heads)
        for linear in (self.down, self.up, self.beta):
            nn.init.normal_(linear.weight, std=0.02)
        nn.init.zeros_(self.beta.bias)

    def forward(self, x: Tensor, heads: Heads, where: Where) -> Tensor:
        D, wide = heads.q.shape[-1], torch.promote_types(heads.q.dtype, torch.float32)
        w = F.normalize(self.up(self.down(x)).to(wide).unflatten(-1, (-1, D)), dim=-1)
        factors = torch.cat((w, 2 * self.beta(x).to(wide).sigmoid().unsqueeze(-1)), dim=-1)  # [B, N, H, D + 1]
        if where.cache is not None:
            factors = where.cache.extend(self, factors)  # of all T tokens
        w, beta = factors.transpose(1, 2).split((D, 1), dim=-1)
        scores = PathScores(heads, w, beta, hidden_between=where.change.always_visible > 0)
        heads = replace(heads, q=torch.zeros_like(heads.q), softcap=None)
        return attention.attend(heads, scores, heads.indices(), where.change)


class Path(Encoding):
    """Knob: rank, of the matrix that gives w, 32 in the paper."""

    def __init__(self, shape: Shape, rank: int):
        super().__init__(shape)
        check(rank >= 1, "pos.rank", rank, "at least 1")
        self.rank = rank

    def layer_module(self, layer: int) -> nn.Module:
        return Householder(self.shape, self.rank)


build = Path
