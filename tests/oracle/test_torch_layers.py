"""Operators and layers train as in torch, each in a small module."""

import math

import pytest
from tests.oracle.compare_modules import Net, assert_trains_as_in_torch
from tests.oracle.zoo import functional, nn, torch

INF, NAN, Normal = math.inf, math.nan, torch.distributions.Normal


def attention_with(mask):
    def forward(module, x):
        q = module.first(x)[:, None, None].expand(-1, 1, 4, 8)
        y = functional.scaled_dot_product_attention(q, q * 2, q * 3, mask(len(x)))
        return module.last(y[:, 0].sum(1))

    return forward


def a_row_of(value, rows):
    found = torch.ones(4, 4, dtype=torch.bool).tril()
    found[1] = False
    return found if value is None else torch.zeros(4, 4).masked_fill(~found, value)


class Masked(nn.Module):
    """torch's own encoder and decoder, with masks that it looks into."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.layers = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        sequence = torch.stack([self.first(x), x, -x], 1)
        mask = nn.Transformer.generate_square_subsequent_mask(3)
        other = torch.tensor([[False, True, False], [False, False, True], [True, False, False]])
        return self.last(self.layers(sequence, sequence * 2, src_mask=other, tgt_mask=mask).sum(1))


class Padded(nn.Module):
    """A transformer layer with one sequence that is only padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        sequence = torch.stack([self.first(x), x], 1)
        padding = (x[:, :2] > 10) | (torch.arange(len(x))[:, None] == 0)
        return self.last(self.layer(sequence, src_key_padding_mask=padding).nan_to_num(0).sum(1))


@pytest.mark.long
def test_masks_that_torch_looks_into_train_as_in_torch():
    assert_trains_as_in_torch(Masked())


FULLY_MASKED = {
    "booleans": Net(attention_with(lambda rows: a_row_of(None, rows))),
    "-inf": Net(attention_with(lambda rows: a_row_of(-INF, rows))),
    "layer": Padded(),
}


@pytest.mark.parametrize("case", FULLY_MASKED)
def test_attention_of_a_fully_masked_position(case):
    assert_trains_as_in_torch(FULLY_MASKED[case])


def look_up(table):
    """Multiply by rows of a constant table, looked up by the batch."""
    return lambda m, x: m.last(m.first(x) * table(m, x.abs().long().clamp(0, 4).sum(1) % 5))


WIDE = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
MODULES = {
    "scatter reduce": Net(
        lambda m, x: m.last(m.first(x) * x.scatter(1, torch.zeros(len(x), 3, dtype=torch.long), x, reduce="add"))
    ),
    "scatter_reduce mean": Net(
        lambda m, x: m.last(x.scatter_reduce(1, (x > 0).long(), m.first(x), "mean", include_self=False))
    ),
    "scatter_reduce amax": Net(lambda m, x: m.last(x.scatter_reduce(1, (x > 0).long(), m.first(x), "amax"))),
    "index_reduce": Net(
        lambda m, x: m.last(m.first(x).index_reduce(1, torch.tensor([0, 1, 1]), m.first(x)[:, :3] * 2, "amax"))
    ),
    "scale_grad_by_freq": Net(
        lambda m, x: m.last(m.table((x > 0).long()).sum(1)), table=nn.Embedding(5, 8, scale_grad_by_freq=True)
    ),
    "padding_idx": Net(lambda m, x: m.last(m.table((x > 0).long()).sum(1)), table=nn.Embedding(5, 8, padding_idx=1)),
    "sparse": Net(lambda m, x: m.last(m.table((x > 0).long()).sum(1)), table=nn.Embedding(5, 8, sparse=True)),
    "uint8": Net(lambda m, x: m.last(m.first(x) * (m.scale * 2).float()), scale=torch.tensor([200], dtype=torch.uint8)),
    "16 and 32 bits": Net(
        lambda m, x: m.last(m.first(x) * (m.narrow + m.whole)),
        narrow=torch.full((8,), 0.1, dtype=torch.bfloat16),
        whole=torch.full((8,), 1.001),
    ),
    "schedule of the batch": Net(look_up(lambda m, t: m.betas[t][:, None]), betas=torch.linspace(0.1, 1, 5)),
    "embedding of a buffer": Net(look_up(lambda m, t: functional.embedding(t, m.rows)), rows=torch.randn(5, 8)),
    "gather of a buffer": Net(look_up(lambda m, t: m.rows.gather(0, t[:, None].expand(-1, 8))), rows=torch.randn(5, 8)),
    "scatter into a buffer": Net(
        look_up(lambda m, t: m.rows.index_add(0, t, m.first(t[:, None].float().expand(-1, 8)))[t]),
        rows=torch.randn(5, 8),
    ),
    "float64": Net(lambda m, x: m.last(m.first(x) * m.wide.sum().float()), wide=WIDE),
    "beta 0": Net(
        lambda m, x: m.last(torch.addmm(m.nothing, m.first(x), m.first.weight, beta=0)), nothing=torch.full((8,), NAN)
    ),
    "interpolate": Net(
        lambda m, x: m.last(
            functional.interpolate(m.first(x)[:, None], scale_factor=0.6, mode="nearest").sum(-1).expand(-1, 8)
        )
    ),
    "spectral norm": Net(
        lambda m, x: m.last(m.layer(x)), layer=nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    ),
    "old spectral norm": Net(lambda m, x: m.last(m.layer(x)), layer=nn.utils.spectral_norm(nn.Linear(8, 8))),
    "batch norm without momentum": Net(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.BatchNorm1d(8, momentum=None)),
    "momentum": Net(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.BatchNorm1d(8, momentum=0.3)),
    "no running statistics": Net(
        lambda m, x: m.last(m.norm(m.first(x))), norm=nn.BatchNorm1d(8, track_running_stats=False)
    ),
    "group norm": Net(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.GroupNorm(2, 8)),
    "instance norm": Net(
        lambda m, x: m.last(m.norm(m.first(x)[:, None])[:, 0]), norm=nn.InstanceNorm1d(1, affine=True)
    ),
    "rms norm": Net(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.RMSNorm(8)),
    "layer norm without bias": Net(lambda m, x: m.last(m.norm(m.first(x))), norm=nn.LayerNorm(8, bias=False)),
    "unused parameter": Net(lambda m, x: m.last(m.first(x)), unused=nn.Linear(3, 3)),
    "unused complex buffer": Net(lambda m, x: m.last(m.first(x)), turns=torch.ones(3, dtype=torch.complex64)),
    "complex buffer": Net(
        lambda m, x: m.last(torch.view_as_real(torch.view_as_complex(m.first(x).view(-1, 4, 2)) * m.turns).flatten(1)),
        turns=torch.polar(torch.ones(4), torch.arange(4.0)),
    ),
    "large integers": Net(lambda m, x: m.last(m.first(x)[:, : 2**63 - 1]) * 2**40 / 2**40),
    "dropout of everything": Net(lambda m, x: m.last(functional.dropout(m.first(x), 1.0, m.training))),
    "batch norm of no rows": Net(lambda m, x: m.last(x) + m.norm(m.first(x)[:0]).sum(), norm=nn.BatchNorm1d(8)),
    "tied": Net(lambda m, x: m.last(m.other(torch.tanh(m.first(x))))),
    "lstm": Net(
        lambda m, x: m.last(m.cells(x[:, None].expand(-1, 3, -1))[0][:, -1]), cells=nn.LSTM(8, 8, 2, batch_first=True)
    ),
    "lstm with a projection": Net(
        lambda m, x: m.last(m.cells(x[:, None].expand(-1, 3, -1))[0][:, -1]),
        cells=nn.LSTM(8, 12, 2, batch_first=True, proj_size=8),
    ),
    "gru with a state": Net(
        lambda m, x: m.last(m.cells(x[None].expand(3, -1, -1), m.first(x)[None])[0][-1]), cells=nn.GRU(8, 8)
    ),
    "cells": Net(lambda m, x: m.last(m.cell(x, (m.first(x), x))[0]), cell=nn.LSTMCell(8, 8)),
    "wide values": Net(
        lambda m, x: m.last(
            functional.scaled_dot_product_attention(
                m.first(x)[:, None, :, None], x[:, None, :, None], m.first(x)[:, None, :, None].expand(-1, -1, -1, 3)
            )[:, 0, :, 2]
        )
    ),
    "max pool with places": Net(
        lambda m, x: m.last(
            functional.max_unpool1d(*functional.max_pool1d(m.first(x)[:, None], 2, return_indices=True), 2)[:, 0]
        )
    ),
    "dilated max pool": Net(
        lambda m, x: m.last(
            functional.max_pool2d(m.first(x)[:, None, None].expand(-1, 1, 3, -1), (1, 2), 1, (0, 1), (1, 2)).sum(2)[
                :, 0
            ]
        )
    ),
    "adaptive max pool": Net(lambda m, x: m.last(functional.adaptive_max_pool1d(m.first(x)[:, None], 8)[:, 0])),
    "adaptive max pool 2d": Net(
        lambda m, x: m.last(functional.adaptive_max_pool2d(m.first(x).view(-1, 1, 2, 4), (2, 4)).flatten(1))
    ),
    "lp pool": Net(lambda m, x: m.last(functional.lp_pool1d(m.first(x)[:, None], 2, 1)[:, 0])),
    "bilinear": Net(lambda m, x: m.last(m.both(m.first(x), x)), both=nn.Bilinear(8, 8, 8)),
    "embedding bag": Net(lambda m, x: m.last(m.bag((x > 0).long())), bag=nn.EmbeddingBag(5, 8)),
    "embedding bag of a maximum": Net(
        lambda m, x: m.last(m.bag((x > 0).long() + (x > 1).long(), None)),
        bag=nn.EmbeddingBag(5, 8, mode="max", padding_idx=0),
    ),
    "weighted embedding bag": Net(
        lambda m, x: m.last(m.bag((x > 0).long(), per_sample_weights=m.first(x))), bag=nn.EmbeddingBag(5, 8, mode="sum")
    ),
    "embedding bag by offsets": Net(
        lambda m, x: m.last(
            functional.embedding_bag(
                (x > 0).long().flatten(),
                m.rows,
                torch.arange(0, x.numel() + 1, 4),
                padding_idx=-1,
                include_last_offset=True,
            ).view(len(x), 8)
        ),
        rows=nn.Parameter(torch.randn(2, 4)),
    ),
    "embedding bag by offsets, equal rows": Net(
        lambda m, x: m.last(m.bag((x > 0).long().flatten(), torch.arange(0, x.numel(), 4)).view(len(x), 8)),
        bag=nn.EmbeddingBag(2, 4, mode="max", _weight=torch.zeros(2, 4)),
    ),
    "gaussian divergence": Net(
        lambda m, x: (
            m.last(x)
            + torch.distributions.kl_divergence(Normal(m.first(x), torch.exp(m.last(x))), Normal(0.0, 1.0)).mean()
        )
    ),
    "gaussian likelihood": Net(
        lambda m, x: m.last(m.first(x)) + functional.gaussian_nll_loss(m.first(x), x, m.first(x).relu())
    ),
    "ctc": Net(
        lambda m, x: (
            m.last(x)
            + functional.ctc_loss(
                m.first(torch.stack([x, x * 2, x * 3, x - 1, -x])).log_softmax(-1),
                (x[:, :2] > 0).long() + 1,
                (x[:, 0] > 0).long() + 4,
                (x[:, 1] > 0).long() + 1,
            )
        )
    ),
    "impossible ctc": Net(
        lambda m, x: (
            m.last(x)
            + functional.ctc_loss(
                m.first(torch.stack([x, x * 2])).log_softmax(-1),
                torch.ones(len(x), 2, dtype=torch.long),
                torch.full((len(x),), 2),
                torch.full((len(x),), 2),
                zero_infinity=True,
            )
        )
    ),
    "grid sample": Net(
        lambda m, x: m.last(
            functional.grid_sample(
                m.first(x).view(-1, 1, 2, 4), (m.first(x)[:, :6] * 2).view(-1, 3, 1, 2), align_corners=False
            )
            .view(len(x), 3)
            .repeat(1, 4)[:, :8]
        )
    ),
    "grid sample on the border": Net(
        lambda m, x: m.last(
            functional.grid_sample(
                m.first(x).view(-1, 1, 2, 4),
                m.first(x)[:, :2].view(-1, 1, 1, 2) * 0 + 1,
                padding_mode="border",
                align_corners=True,
            )
            .view(len(x), 1)
            .repeat(1, 8)
        )
    ),
    "grid sample in volumes": Net(
        lambda m, x: m.last(
            functional.grid_sample(
                m.first(x).view(-1, 1, 2, 2, 2),
                torch.tanh(m.first(x)[:, :6]).view(-1, 2, 1, 1, 3),
                align_corners=True,
                padding_mode="reflection",
            )
            .view(len(x), 2)
            .repeat(1, 4)
        )
    ),
    "antialiased": Net(
        lambda m, x: m.last(
            functional.interpolate(m.first(x).view(-1, 1, 2, 4), (1, 3), mode="bilinear", antialias=True)
            .flatten(1)
            .repeat(1, 3)[:, :8]
        )
    ),
    "antialiased bicubic": Net(
        lambda m, x: m.last(
            functional.interpolate(m.first(x).view(-1, 1, 2, 4), (1, 3), mode="bicubic", antialias=True)
            .flatten(1)
            .repeat(1, 3)[:, :8]
        )
    ),
    "short-time transform": Net(
        lambda m, x: m.last(
            torch.stft(m.first(x), 8, return_complex=True, window=torch.ones(8)).abs().sum(-1).repeat(1, 2)[:, :8]
        )
    ),
    "logarithm of a determinant": Net(
        lambda m, x: m.last(x) + torch.linalg.slogdet(m.first.weight @ m.first.weight.T + torch.eye(8))[1]
    ),
    "classes": Net(
        lambda m, x: (
            m.last(x)
            + functional.cross_entropy(
                m.first(x), (x > 0).long().sum(1) % 8, torch.arange(8.0), ignore_index=3, label_smoothing=0.2
            )
        )
    ),
    "classes without a mean": Net(
        lambda m, x: (
            m.last(x)
            + functional.cross_entropy(m.first(x), (x > 0).long().sum(1) % 8, ignore_index=3, reduction="none")[:, None]
        )
    ),
    "classes of pixels": Net(
        lambda m, x: (
            m.last(x)
            + functional.cross_entropy(
                m.first(x).view(-1, 2, 2, 2), (x[:, :4] > 0).long().view(-1, 2, 2), torch.tensor([1.0, 3.0])
            )
        )
    ),
    "eigenvalues": Net(
        lambda m, x: m.last(x) + torch.linalg.eigvalsh(m.first.weight + m.first.weight.T).square().sum()
    ),
    "qr": Net(lambda m, x: m.last(x @ torch.linalg.qr(m.first.weight)[1])),
    "cdist": Net(lambda m, x: m.last(torch.cdist(m.first(x), m.first.weight))),
    "cdist to shared points": Net(
        lambda m, x: m.last(
            torch.cdist(m.first(x).view(-1, 2, 4), m.first.weight.view(1, 16, 4)[:, :4], p=3.0).flatten(1)
        )
    ),
    "cdist 1": Net(lambda m, x: m.last(torch.cdist(m.first(x), m.first.weight, p=1.0))),
    **{f"pdist {p}": Net(lambda m, x, p=p: m.last(x) + functional.pdist(m.first(x), p).sum()) for p in (1.0, 2.0, INF)},
    "correlations": Net(lambda m, x: m.last(x) + torch.corrcoef(m.first(x).T).square().sum()),
    "covariances": Net(lambda m, x: m.last(x) + m.first(x).T.cov(correction=0).square().sum()),
    "median without NaN": Net(
        lambda m, x: m.last(m.first(x).masked_fill(x > 0, NAN).nanmedian(1, keepdim=True)[0].nan_to_num(1) * x)
    ),
    "most frequent": Net(lambda m, x: m.last(x * m.first(x).round().mode(1, keepdim=True)[0] * m.first(x))),
    "incomplete gamma": Net(lambda m, x: m.last(torch.special.gammainc(x.abs() + 0.5, m.first(x).abs() + 0.5))),
    "prelu": Net(lambda m, x: m.last(m.slope(m.first(x))), slope=nn.PReLU(8)),
    "glu": Net(lambda m, x: m.last(functional.glu(torch.cat([m.first(x), x], 1)))),
    "fold": Net(lambda m, x: m.last(functional.unfold(m.first(x).view(-1, 1, 2, 4), (1, 1)).flatten(1))),
    "einsum": Net(lambda m, x: m.last(torch.einsum("bi,bj,ji->bi", m.first(x), x, m.first.weight))),
    "pixel shuffle": Net(lambda m, x: m.last(functional.pixel_shuffle(m.first(x).view(-1, 4, 1, 2), 2).flatten(1))),
    "roll": Net(lambda m, x: m.last(m.first(x).roll(2, 1))),
    "cross": Net(lambda m, x: m.last(torch.cat([torch.linalg.cross(m.first(x)[:, :3], x[:, :3]), x[:, :5]], 1))),
    "masked_scatter": Net(lambda m, x: m.last(m.first(x).masked_scatter(x > 0, x * 2))),
    "diagonal_scatter": Net(lambda m, x: m.last(m.first(x) @ m.first.weight.diagonal_scatter(torch.ones(8)))),
    "repeat_interleave": Net(lambda m, x: m.last(m.first(x)[:, :4].repeat_interleave(2, 1))),
    "repeat_interleave by a tensor": Net(
        lambda m, x: m.last(m.first(x)[:, :4].repeat_interleave(m.counts, 1, output_size=8)),
        counts=torch.tensor([1, 0, 5, 2]),
    ),
    "searchsorted": Net(
        look_up(lambda m, t: torch.searchsorted(m.bounds, t.float())[:, None]), bounds=torch.arange(4.0)
    ),
    "bucketize": Net(
        look_up(lambda m, t: torch.bucketize(t.float(), m.bounds, right=True)[:, None]), bounds=torch.arange(4.0)
    ),
    "bincount": Net(look_up(lambda m, t: torch.bincount(t, minlength=5)[t][:, None])),
    "one_hot": Net(look_up(lambda m, t: functional.one_hot(t, 8))),
    "tensor_split": Net(lambda m, x: m.last(torch.cat(m.first(x).tensor_split(3, 1)[::-1], 1))),
    "unfold of a tensor": Net(lambda m, x: m.last(m.first(x).unfold(1, 3, 1).sum(-1).repeat(1, 2)[:, :8])),
    "as_strided": Net(lambda m, x: m.last(m.first(x).as_strided((len(x), 8), (8, 1)))),
    "triangular": Net(lambda m, x: m.last(m.first(x) @ m.first.weight.tril())),
    "nan_to_num": Net(lambda m, x: m.last(torch.nan_to_num(m.first(x) / (x > 0).float(), 0.0, 1.0, -1.0))),
    "clip of norm": Net(lambda m, x: m.last(m.first(x).renorm(2, 0, 1.0))),
    "cholesky": Net(lambda m, x: m.last(x @ torch.linalg.cholesky(m.first.weight @ m.first.weight.T + torch.eye(8)))),
    "solve": Net(lambda m, x: m.last(torch.linalg.solve(m.first.weight + 3 * torch.eye(8), x.T).T)),
    "inverse": Net(lambda m, x: m.last(x @ torch.linalg.inv(m.first.weight + 3 * torch.eye(8)))),
    "determinant": Net(lambda m, x: m.last(x) * torch.linalg.det(m.first.weight + 2 * torch.eye(8))),
    "fft": Net(lambda m, x: m.last(torch.fft.irfft(torch.fft.rfft(m.first(x)) * 2, n=8))),
    "fft size": Net(lambda m, x: m.last(torch.fft.fft(m.first(x)).abs())),
}
MODULES["tied"].other = nn.Linear(8, 8)
MODULES["tied"].other.weight = MODULES["tied"].first.weight


@pytest.mark.long
@pytest.mark.parametrize("case", MODULES)
def test_operators_and_layers_train_as_in_torch(case):
    assert_trains_as_in_torch(MODULES[case], batch_sizes=(4, 7))
