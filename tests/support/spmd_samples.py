"""Small calls of every operator that has a sharding rule: sizes that divide, that do not, and too few for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support import cuda_attention  # noqa: F401 - the kernels
from tests.support.spmd_rules import Sample
from wholestep.functional import Functionalized, UnderGrad

aten = torch.ops.aten


def t(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def pos(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.1


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def yes(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


def samples() -> list[Sample]:
    """All samples but random ones."""
    torch.manual_seed(0)
    return [*(Sample(target, *_split(given)) for family in FAMILIES for target, *given in family()), *recurrent()]


def _split(given: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keyword arguments are a dict at the end."""
    return (tuple(given[:-1]), given[-1]) if given and isinstance(given[-1], dict) else (tuple(given), {})


def contractions() -> Iterator[Any]:
    yield aten.mm.default, t(5, 4), t(4, 7)
    yield aten.bmm.default, t(3, 5, 4), t(3, 4, 2)
    yield aten.mv.default, t(5, 4), t(4)
    yield aten.dot.default, t(5), t(5)
    yield aten.vdot.default, t(5), t(5)
    yield aten.addmm.default, t(7), t(5, 4), t(4, 7)
    yield aten.addmm.default, t(5, 7), t(5, 4), t(4, 7), {"beta": 0.5, "alpha": 2}
    yield aten.addmv.default, t(5), t(5, 4), t(4)
    yield aten.baddbmm.default, t(3, 5, 2), t(3, 5, 4), t(3, 4, 2)
    yield aten.baddbmm.default, t(1, 5, 1), t(3, 5, 4), t(3, 4, 2)
    yield aten.addbmm.default, t(5, 2), t(3, 5, 4), t(3, 4, 2)
    yield aten.addr.default, t(5, 4), t(5), t(4)


def pointwise() -> Iterator[Any]:
    yield aten.add.Tensor, t(5, 4), t(4)
    yield aten.add.Tensor, t(5, 4), 2.0
    yield aten.add.Tensor, t(5, 1), t(5, 4), {"alpha": 3}
    yield aten.sub.Tensor, t(5, 4), t(5, 4)
    yield aten.mul.Tensor, t(5, 4), t(5, 1)
    yield aten.mul.Scalar, t(5, 4), 3.0
    yield aten.div.Tensor, t(5, 4), pos(4)
    yield aten.div.Tensor_mode, t(5, 4), pos(4), {"rounding_mode": "floor"}
    yield aten.div.Scalar, t(5), 4
    for one in ("neg", "clone", "alias", "detach", "positive", "relu", "tanh", "exp", "gelu", "silu", "sigmoid",
                "rsqrt", "abs", "log", "isinf", "conj_physical", "lift_fresh_copy", "cos", "softplus", "leaky_relu",
                "hardtanh", "elu", "log_sigmoid_forward", "logical_not", "sign", "reciprocal", "erf", "hardswish",
                "mish"):  # fmt: skip
        yield getattr(aten, one).default, t(5, 4)
    yield aten._to_copy.default, t(5, 4), {"dtype": torch.float32}
    yield aten.copy.default, t(5, 4), t(4)
    yield aten.copy.default, t(5, 4), t(5, 4)
    yield aten.where.self, yes(5, 4), t(5, 4), t(4)
    yield aten.lerp.Scalar, t(5, 4), t(5, 4), 0.3
    yield aten.lerp.Tensor, t(5, 4), t(5, 4), t(5, 4)
    yield aten.addcmul.default, t(5, 4), t(5, 4), t(5, 4), {"value": 0.5}
    yield aten.addcdiv.default, t(5, 4), t(5, 4), pos(5, 4)
    yield aten.clamp.default, t(5, 4), -0.5, 0.5
    yield aten.pow.Tensor_Scalar, t(5, 4), 2
    yield aten.pow.Tensor_Tensor, pos(5, 4), t(4)
    yield aten.eq.Scalar, ints(3, 5, 4), 1
    yield aten.ge.Tensor, t(5, 4), t(5, 4)
    yield aten.minimum.default, t(5, 4), t(4)
    yield aten.masked_fill.Scalar, t(5, 4), yes(5, 4), 0
    yield aten.masked_fill.Scalar, t(5, 4), yes(4), 2.0
    yield aten.masked_fill.Tensor, t(5, 4), yes(5, 4), torch.tensor(1.5, dtype=torch.float64)
    yield aten.tanh_backward.default, t(5, 4), t(5, 4)
    yield aten.sigmoid_backward.default, t(5, 4), t(5, 4)
    yield aten.threshold_backward.default, t(5, 4), t(5, 4), 0
    yield aten.gelu_backward.default, t(5, 4), t(5, 4)
    yield aten.silu_backward.default, t(5, 4), t(5, 4)
    yield aten.elu_backward.default, t(5, 4), 1.0, 1, 1, False, t(5, 4)
    yield aten.softplus_backward.default, t(5, 4), t(5, 4), 1, 20
    yield aten.leaky_relu_backward.default, t(5, 4), t(5, 4), 0.1, False
    yield aten.hardtanh_backward.default, t(5, 4), t(5, 4), -1, 1
    yield aten.hardswish_backward.default, t(5, 4), t(5, 4)
    yield aten.hardsigmoid_backward.default, t(5, 4), t(5, 4)
    yield aten.mish_backward.default, t(5, 4), t(5, 4)
    yield aten.logit_backward.default, t(5, 4), pos(5, 4), 0.01
    yield aten.log_sigmoid_backward.default, t(5, 4), (x := t(5, 4)), aten.log_sigmoid_forward(x)[1]
    yield aten._prelu_kernel.default, t(5, 4), t(1, 4)
    yield aten._prelu_kernel_backward.default, t(5, 4), t(5, 4), t(1, 4)
    yield aten.native_dropout_backward.default, t(5, 4), yes(5, 4), 2.0
    for one in ("ones", "zeros"):
        yield getattr(aten, f"{one}_like").default, t(5, 4)
        yield getattr(aten, f"new_{one}").default, t(5, 4), [3, 2]
        yield getattr(aten, f"new_{one}").default, t(5, 4), [5, 4]
    yield aten.full_like.default, t(5, 4), 2.0
    yield aten.copy.default, aten.new_empty_strided(t(5, 4), [4, 5], [1, 4]), t(4, 5)
    yield aten.new_full.default, t(5, 4), [5, 4], 2.0
    yield aten.fill.Scalar, t(5, 4), 2.0
    yield aten.fill.Tensor, t(5, 4), torch.tensor(2.0, dtype=torch.float64)


def reductions() -> Iterator[Any]:
    yield aten.sum.default, t(5, 4)
    yield aten.sum.dim_IntList, t(5, 4), [0]
    yield aten.sum.dim_IntList, t(5, 4), [-1], True
    yield aten.sum.dim_IntList, yes(5, 4), [0]
    yield aten.mean.default, t(5, 4)
    yield aten.mean.dim, t(5, 4, 7), [0, 2], True
    yield aten.amax.default, t(6, 4), [0]
    yield aten.amin.default, t(6, 4), [-1], True
    yield aten.prod.dim_int, t(5, 4), 1
    yield aten.prod.default, t(5, 4)
    yield aten.nansum.default, t(5, 4), [0]
    yield aten.count_nonzero.dim_IntList, ints(3, 5, 4), [0]
    for one in (aten.any, aten.all):
        yield one.default, yes(5, 4)
        yield one.dim, yes(5, 4), 1, True
        yield one.dims, yes(5, 4), [0, 1]
    yield aten.argmax.default, t(5, 4), 1
    yield aten.argmin.default, t(5, 4), 0, True
    for one in (aten.var, aten.std, aten.var_mean, aten.std_mean):
        yield one.correction, t(5, 4), [0], {"correction": 1}
        yield one.correction, 1e6 + t(4, 5, 2), [0, 1], {"correction": 0, "keepdim": True}
        yield one.correction, t(5, 4), {}
    for order in (2.0, 1.0, 0.0, 3.0, float("inf"), float("-inf")):
        yield aten.linalg_vector_norm.default, t(6, 4), order, [0]
    yield aten.linalg_vector_norm.default, t(5, 4)
    yield aten.linalg_vector_norm.default, t(5, 4), 2, [1], True
    yield aten.logsumexp.default, t(5, 4), [0]
    yield aten.logsumexp.default, t(4, 5) - torch.inf * yes(4, 1), [0, 1], True


def softmax() -> Iterator[Any]:
    for one in (aten._softmax, aten._log_softmax):
        yield one.default, t(5, 4), 1, False
        yield one.default, t(4, 5, 2) * 30, 0, False
    yield aten._softmax.default, t(5, 4).bfloat16(), 1, False
    minus = t(5, 4).masked_fill(yes(5, 4), -torch.inf)
    minus[1] = -torch.inf
    yield aten._safe_softmax.default, minus, 1
    yield aten._safe_softmax.default, minus, 0
    for one in (aten._softmax_backward_data, aten._log_softmax_backward_data):
        yield one.default, t(5, 4), t(5, 4).log_softmax(1), 1, torch.float64
        yield one.default, t(5, 4), t(5, 4).softmax(0), 0, torch.float64


def along() -> Iterator[Any]:
    yield aten.cumsum.default, t(5, 4), 1
    for one in ("cumprod", "logcumsumexp", "cummax", "cummin"):
        yield getattr(aten, one).default, t(5, 4), 0
    yield torch.ops.wholestep_formulas.product_gradient.default, "ProdBackward1", t(5, 1), t(5, 4), 1
    yield torch.ops.wholestep_formulas.masked_sum.default, t(5, 4), yes(5, 4), True
    yield torch.ops.wholestep_formulas.masked_sum.default, t(3, 5, 4), yes(5, 1), False
    yield aten.sort.default, t(5, 4), 1
    yield aten.sort.stable, t(5, 4), {"stable": True, "dim": 0}
    yield aten.topk.default, t(5, 4), 2
    yield aten.max.dim, t(5, 4), 1
    yield aten.min.dim, t(5, 4), 0, True
    yield aten.median.dim, t(5, 4), 1
    for one in (aten.max, aten.min):
        yield one.default, t(3, 5, 4)
    yield aten.glu.default, t(5, 4), 1
    yield aten.glu_backward.default, t(5, 2), t(5, 4), 1
    yield aten.flip.default, t(5, 4), [1]
    yield aten.roll.default, t(5, 4), [1], [0]
    yield aten.tril.default, t(3, 5, 4), 1
    yield aten.triu.default, t(5, 7), -1
    yield aten.linalg_inv_ex.default, t(5, 3, 3)
    yield aten.linalg_qr.default, t(5, 4, 3)
    yield aten._linalg_det.default, t(5, 3, 3)
    yield aten._cdist_forward.default, t(3, 5, 4), t(3, 2, 4), 2.0, None
    yield aten._fft_r2c.default, t(5, 4), [1], 0, True
    yield aten.view_as_real.default, torch.randn(5, 4, dtype=torch.complex128)
    yield aten.view_as_complex.default, t(5, 4, 2)


def normalisations() -> Iterator[Any]:
    for shape, over in (((5, 4, 6), 1), ((4, 3, 5), 2)):
        last, lead = list(shape[-over:]), len(shape) - over
        x, weight, bias = 100 + t(*shape), t(*last), t(*last)
        yield aten.native_layer_norm.default, x, last, weight, bias, 1e-5
        yield aten.native_layer_norm.default, x, last, None, None, 1e-5
        dims = list(range(lead, 3))
        mean, rstd = x.mean(dims, True), (x.var(dims, correction=0, keepdim=True) + 1e-5).rsqrt()
        for mask in ([True] * 3, [True, False, False], [False, True, True]):
            yield (aten.native_layer_norm_backward.default, t(*shape), x, last, mean, rstd, weight, bias, mask)
        yield aten.native_layer_norm_backward.default, t(*shape), x, last, mean, rstd, None, None, [True, False, False]
    x = t(5, 6, 3)
    norm = aten.native_group_norm.default
    for groups in (2, 3):
        yield norm, x, t(6), t(6), 5, 6, 3, groups, 1e-5
        _, mean, rstd = norm(x, None, None, 5, 6, 3, groups, 1e-5)
        yield aten.native_group_norm_backward.default, t(5, 6, 3), x, mean, rstd, t(6), 5, 6, 3, groups, [True] * 3
    pure = Functionalized(aten.native_batch_norm.default, (3, 4))
    for shape in ((5, 4, 3), (4, 5), (4, 3, 2, 5)):
        c = shape[1]
        for training in (True, False):
            x = 10 + t(*shape)
            yield pure, x, t(c), t(c), t(c), pos(c), training, 0.1, 1e-5
            mean, scale = x.transpose(0, 1).flatten(1).mean(1), x.transpose(0, 1).flatten(1).var(1, False).rsqrt()
            if not training:
                mean, scale = t(0), t(0)
            backward = aten.native_batch_norm_backward.default
            yield backward, t(*shape), x, t(c), t(c), pos(c), mean, scale, training, 1e-5, [True] * 3
            yield backward, t(*shape), x, None, t(c), pos(c), mean, scale, training, 1e-5, [True, False, False]
    yield pure, t(4, 5), None, None, None, None, True, 0.1, 1e-5


def recurrent() -> Iterator[Sample]:
    """An LSTM's layer, of which a kernel keeps what only its backward can read."""
    layer, backward = aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default

    def run(x: Tensor, *weights_and_state: Tensor) -> Any:
        with torch.enable_grad():
            return layer(x, *weights_and_state, *flags)

    for batch in (5, 4):
        time, hidden = 3, 2
        flags = (False, [], 2, hidden, 2, True, False, False, True)
        weights = [torch.randn(4 * hidden, n) for n in (4, hidden)] + [torch.randn(4 * hidden) for _ in range(2)]
        state = [torch.randn(batch, hidden) for _ in range(2)]
        given = (torch.randn(time, batch, 4), *weights, *state)
        *made, workspace = run(*given)
        yield Sample(UnderGrad(layer), (*given, *flags))
        grads = [torch.randn_like(one) for one in made]
        for some in (grads, [grads[0], None, None]):
            rest = (False, 2, hidden, 2, True, True, False, [], False)
            yield Sample(backward, (*given, *made, *some, *rest, workspace), own=lambda *ins: run(*ins[:7])[3])


def convolutions() -> Iterator[Any]:
    two = [[1, 1], [1, 1], [1, 1]]
    for groups, weight, transposed in ((1, (4, 6, 3, 3), False), (1, (6, 4, 3, 3), True), (6, (6, 1, 3, 3), False),
                                       (6, (6, 2, 3, 3), True), (2, (4, 3, 3, 3), False)):  # fmt: skip
        w = t(*weight)
        go = weight[1] * groups if transposed else weight[0]
        for bias in (None, t(go)):
            yield aten.convolution.default, t(5, 6, 4, 4), w, bias, *two, transposed, [0, 0], groups
        grad = aten.convolution(t(5, 6, 4, 4), w, None, *two, transposed, [0, 0], groups)
        rest = (*two, transposed, [0, 0], groups)
        yield aten.convolution_backward.default, grad, t(5, 6, 4, 4), w, [go], *rest, [True] * 3
        yield aten.convolution_backward.default, grad, t(5, 6, 4, 4), w, None, *rest, [True, True, False]
    yield aten.convolution.default, t(4, 3, 8), t(5, 3, 2), None, [2], [0], [1], False, [0], 1
    out, at = aten.max_pool2d_with_indices(x := t(5, 4, 6, 6), [2, 2], [2, 2])
    yield aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2]
    yield aten.max_pool2d_with_indices.default, t(4, 6, 6), [2, 2]
    yield aten.max_pool2d_with_indices_backward.default, out, x, [2, 2], [2, 2], [0, 0], [1, 1], False, at
    yield aten.avg_pool2d.default, x, [2, 2]
    yield aten.avg_pool2d_backward.default, t(5, 4, 3, 3), x, [2, 2], [2, 2], [0, 0], False, True, None
    yield aten._adaptive_avg_pool2d.default, x, [3, 2]
    yield aten._adaptive_avg_pool2d_backward.default, t(5, 4, 3, 2), x
    yield aten.adaptive_max_pool2d.default, x, [3, 2]
    yield aten.avg_pool3d.default, t(5, 2, 4, 4, 4), [2, 2, 2]
    yield aten.max_pool3d_with_indices.default, t(5, 2, 4, 4, 4), [2, 2, 2]
    yield aten.reflection_pad2d.default, x, [1, 1, 1, 1]
    yield aten.replication_pad1d.default, t(5, 4, 6), [1, 2]
    yield aten.upsample_nearest2d.default, x, [12, 12]
    yield aten.upsample_nearest2d_backward.default, t(5, 4, 12, 12), [12, 12], [5, 4, 6, 6]
    yield aten.upsample_bilinear2d.default, x, [9, 9], False
    yield aten.upsample_bilinear2d_backward.default, t(5, 4, 9, 9), [9, 9], [5, 4, 6, 6], False
    yield aten.upsample_linear1d.default, t(5, 4, 6), [9], False
    yield aten.pixel_shuffle.default, t(5, 4, 3, 3), 2
    yield aten.im2col.default, x, [2, 2], [1, 1], [0, 0], [2, 2]
    yield aten.col2im.default, t(5, 16, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]
    yield aten.grid_sampler_2d.default, x, torch.rand(5, 3, 3, 2, dtype=torch.float64), 0, 0, False


def attention() -> Iterator[Any]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for heads, few in ((6, 6), (6, 2), (4, 4)):
        # in float32: of float64, fake tensors of torch 2.11 and 2.12 have sums in float32, and kernels do not
        q, k, v = (t(5, count, 7, 8).float() for count in (heads, few, few))
        masks = t(1, 1, 7, 7).float(), t(5, heads, 7, 7).float()
        for causal, mask in ((True, None), (False, None), *((False, mask) for mask in masks)):
            keywords = {} if mask is None else {"attn_mask": mask}
            yield forward, q, k, v, 0.0, causal, keywords
            out, sums = forward(q, k, v, 0.0, causal, **keywords)
            yield backward, t(*out.shape).float(), q, k, v, out, sums, 0.0, causal, keywords
    names = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
    flash, efficient, cudnn = (getattr(aten, name).default for name in names)
    to_flash, to_efficient, to_cudnn = (getattr(aten, f"{name}_backward").default for name in names)
    for causal, few in ((True, 6), (False, 2)):
        q, k, v = (t(5, count, 7, 8).float() for count in (6, few, few))
        yield flash, q, k, v, 0.0, causal
        out, sums, _, _, *lengths, seed, offset, _ = flash(q, k, v, 0.0, causal)
        yield to_flash, t(*out.shape).float(), q, k, v, out, sums, None, None, *lengths, 0.0, causal, seed, offset
    for bias in (None, t(1, 6, 7, 7).float(), t(5, 6, 7, 7).float()):
        q, k, v = (t(5, 6, 7, 8).float() for _ in range(3))
        yield efficient, q, k, v, bias, True
        out, sums, seed, offset = efficient(q, k, v, bias, True)
        wanted = [True, True, True, bias is not None]
        yield to_efficient, t(*out.shape).float(), q, k, v, bias, out, sums, seed, offset, 0.0, wanted
        yield cudnn, q, k, v, bias, True
        out, sums, _, _, *lengths, seed, offset, _ = cudnn(q, k, v, bias, True)
        states = out, sums, seed, offset, bias, None, None, *lengths
        yield to_cudnn, t(*out.shape).float(), q, k, v, *states, 0.0, False


def losses() -> Iterator[Any]:
    target, weight = ints(4, 5), pos(4)
    target[:3] = 2
    for reduction in (0, 1, 2):
        for w, ignored in ((None, -100), (weight, 2), (None, 2)):
            x = t(5, 4)
            yield aten.nll_loss_forward.default, x, target, w, reduction, ignored
            _, total = aten.nll_loss_forward(x, target, w, reduction, ignored)
            grad = t(5) if reduction == 0 else t()
            yield aten.nll_loss_backward.default, grad, x, target, w, reduction, ignored, total
        x, target2 = t(5, 3, 2, 4), ints(3, 5, 2, 4)
        yield aten.nll_loss2d_forward.default, x, target2, None, reduction, 1
        _, total = aten.nll_loss2d_forward(x, target2, None, reduction, 1)
        grad = t(5, 2, 4) if reduction == 0 else t()
        yield aten.nll_loss2d_backward.default, grad, x, target2, None, reduction, 1, total
        for one, rest in (("mse_loss", ()), ("smooth_l1_loss", (1.0,)), ("huber_loss", (1.0,)),
                          ("binary_cross_entropy", (None,)), ("soft_margin_loss", ())):  # fmt: skip
            x, y = pos(5, 4) / 2, pos(5, 4).round()
            grad = t(5, 4) if reduction == 0 else t()
            before, after = (rest, ()) if one == "binary_cross_entropy" else ((), rest)
            yield getattr(aten, one).default, x, y, *before, reduction, *after
            yield getattr(aten, f"{one}_backward").default, grad, x, y, *before, reduction, *after
        yield aten.binary_cross_entropy_with_logits.default, t(5, 4), pos(5, 4), None, pos(4), reduction
    yield aten.nll_loss_forward.default, t(4), ints(4).reshape(()), None, 1, -100
    yield aten.nll_loss_forward.default, t(5, 4), torch.full((5,), -100), None, 1, -100


def indexing() -> Iterator[Any]:
    yield aten.embedding.default, t(7, 4), ints(7, 5, 2)
    yield aten.embedding.default, t(4, 4), ints(4, 5), 1
    for padding in (-1, 1):
        yield aten.embedding_dense_backward.default, t(5, 2, 4), ints(7, 5, 2), 7, padding, False
    yield aten.embedding_dense_backward.default, t(5, 4), ints(4, 5), 4, -1, True
    yield aten.gather.default, t(5, 4), 1, ints(4, 5, 3)
    yield aten.gather.default, t(4, 5), 0, ints(4, 2, 5)
    yield aten.gather.default, t(6, 4), 1, ints(4, 5, 3)
    yield aten.index_select.default, t(5, 4), 1, ints(4, 3)
    yield aten.index_select.default, t(4, 5), 0, ints(4, 7)
    yield aten.scatter.value, t(5, 4), 1, ints(4, 5, 1), 2.0
    yield aten.scatter.src, t(5, 4), 1, ints(4, 5, 1), t(5, 2)
    yield aten.scatter_add.default, t(5, 4), 1, ints(4, 5, 6), t(5, 6)
    yield aten.scatter_add.default, t(4, 5), 0, ints(4, 3, 5), t(3, 5)
    yield aten.scatter_reduce.two, t(5, 4), 0, ints(5, 6, 4), t(6, 4), "amax"
    yield aten.index_add.default, t(5, 4), 0, ints(5, 6), t(6, 4)
    yield aten.index_copy.default, t(5, 4), 1, torch.tensor([2, 0]), t(5, 2)
    yield aten.index_fill.int_Scalar, t(5, 4), 1, torch.tensor([2, 0]), 3
    yield aten.index.Tensor, t(5, 4), [ints(5, 7) - 5]
    yield aten.index.Tensor, t(5, 4), [torch.arange(5), ints(4, 5)]
    yield aten.index.Tensor, t(5, 4, 3), [None, ints(4, 2, 3)]
    yield aten.index.Tensor, t(5, 4, 3), [ints(5, 2, 1), None, ints(3, 4)]
    yield aten.index.Tensor, t(5, 4, 3), [None, ints(4, 2, 1), ints(3, 5)]
    for adds in (True, False):
        yield aten.index_put.default, t(5, 4), [torch.tensor([0, 3, -1])], t(3, 4), adds
        yield aten.index_put.default, t(5, 4), [torch.arange(5), torch.tensor([1, 0, 3, 2, 1])], t(5), adds
        yield aten.index_put.default, t(5, 4, 3), [None, torch.tensor([2, 0])], t(), adds
        both = [torch.tensor([[1], [2]]), None, torch.tensor([0, 2])]
        yield aten.index_put.default, t(5, 4, 3), both, t(2, 2, 4), adds
    yield aten.index_put.default, t(4, 3), [torch.tensor([2, 2, 0, 1])], t(4, 3), True
    yield aten.bucketize.Tensor, t(5, 4), t(6).sort()[0]
    yield aten.isin.Tensor_Tensor, ints(5, 5, 4), torch.tensor([1, 3])


def views() -> Iterator[Any]:
    yield aten.t.default, t(5, 4)
    yield aten.transpose.int, t(5, 4, 3), 0, -1
    yield aten.permute.default, t(5, 4, 3), [2, 0, 1]
    yield aten.expand.default, t(5, 1), [3, 5, 4]
    yield aten.view.default, t(4, 5, 6), [20, 6]
    yield aten.view.default, t(12, 5), [6, 2, 5]
    yield aten.view.default, t(6, 12), [6, 6, 2, 1]
    yield aten._unsafe_view.default, t(6, 2, 5), [12, 5]
    yield aten.unsqueeze.default, t(5, 4), 1
    yield aten.squeeze.dim, t(5, 1, 4), 1
    yield aten.squeeze.default, t(1, 5, 4)


def pieces() -> Iterator[Any]:
    yield aten.slice.Tensor, t(5, 4), 0, 1, 3
    yield aten.slice.Tensor, t(7, 4), 0, -6, 100, 3
    yield aten.slice.Tensor, t(5, 4), 1, 0, 2
    yield aten.slice.Tensor, t(5, 4), 0, 0, 9223372036854775807
    yield aten.select.int, t(5, 4), 0, -1
    yield aten.select.int, ints(9, 4, 5), 1, 2
    yield aten.split.Tensor, t(5, 4), 2, 1
    yield aten.split_with_sizes.default, t(5, 4), [1, 3], 1
    yield aten.unsafe_split.Tensor, t(5, 4), 3
    yield aten.unbind.int, t(5, 3), 1
    yield aten.diagonal.default, t(5, 4, 3), 1, 0, 2
    yield aten.unfold.default, t(5, 6), 1, 3, 2
    yield aten.cat.default, [t(5, 4), t(5, 3)], 1
    yield aten.cat.default, [t(5, 4), t(2, 4), t(1, 4)]
    yield aten.cat.default, [t(0), t(5, 4, 3)], -2
    yield aten.stack.default, [t(5, 4), t(5, 4)], 1
    yield aten.stack.default, [t(), t()]
    yield aten.constant_pad_nd.default, t(5, 4), [1, 2]
    yield aten.constant_pad_nd.default, t(5, 4), [0, 0, -1, 2], 3.0
    yield aten.repeat.default, t(5, 4), [2, 1, 3]
    yield aten.slice_backward.default, t(5, 2), [5, 4], 1, 1, 3, 1
    yield aten.select_backward.default, t(5, 3), [5, 4, 3], 1, 2
    yield aten.diagonal_backward.default, aten.diagonal(t(5, 4, 3), 1, 0, 2), [5, 4, 3], 1, 0, 2
    yield aten.unfold_backward.default, t(5, 2, 3), [5, 6], 1, 3, 2
    yield aten.slice_scatter.default, t(5, 4), t(5, 2), 1, 1, 3
    yield aten.slice_scatter.default, t(5, 4), t(5, 4), 1
    yield aten.select_scatter.default, t(5, 4), t(5), 1, 2
    yield aten.diagonal_scatter.default, t(5, 4, 4), t(5, 4), 0, 1, 2


def lists() -> Iterator[Any]:
    some = [t(5, 4), t(3)]
    yield aten._foreach_add.List, some, [t(5, 4), t(3)]
    yield aten._foreach_mul.Scalar, some, 2.0
    yield aten._foreach_mul.Tensor, some, torch.tensor(2.0, dtype=torch.float64)
    yield aten._foreach_addcdiv.Scalar, some, [t(5, 4), t(3)], [pos(5, 4), pos(3)], 0.5
    yield aten._foreach_lerp.Scalar, some, [t(5, 4), t(3)], 0.5
    yield aten._foreach_sqrt.default, [pos(5, 4), pos(3)]
    yield aten._foreach_norm.Scalar, some, 2
    yield aten._foreach_norm.Scalar, some, float("inf")
    adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False,
            "maximize": False}  # fmt: skip
    steps = [torch.tensor(3.0, dtype=torch.float64)] * 2
    yield aten._fused_adamw.default, some, [t(5, 4), t(3)], [t(5, 4), t(3)], [pos(5, 4), pos(3)], [], steps, adam
    sgd = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False,
           "is_first_step": False}  # fmt: skip
    yield aten._fused_sgd.default, some, [t(5, 4), t(3)], [t(5, 4), t(3)], sgd


FAMILIES = [contractions, pointwise, reductions, softmax, along, normalisations, convolutions, attention, losses,
            indexing, views, pieces, lists]  # fmt: skip


def random_samples() -> list[Sample]:
    """Of operators that draw: to be seeded before each call."""
    torch.manual_seed(0)
    p = pos(5, 4) / 2
    fills = {"bernoulli_": ("float", 0.3), "uniform_": ("default", 0.0, 2.0), "normal_": ("default", 1.0, 2.0),
             "random_": ("default",), "exponential_": ("default", 1.5), "log_normal_": ("default", 0.0, 1.0),
             "cauchy_": ("default", 0.0, 1.0), "geometric_": ("default", 0.4)}  # fmt: skip
    found = []
    for name, (overload, *numbers) in fills.items():
        pure = Functionalized(getattr(getattr(aten, name), overload))
        found += [Sample(pure, (x, *numbers)) for x in (t(5, 4), t(5, 1, 3), t(4, 5).t())]
    found.append(Sample(Functionalized(aten.bernoulli_.Tensor), (t(5, 4), p)))
    found += [Sample(aten.rand_like.default, (p,)), Sample(aten.randn_like.default, (p,))]
    found += [Sample(aten.randint_like.default, (p, 9)), Sample(aten.bernoulli.default, (p,))]
    found += [Sample(aten.normal.Tensor_Tensor, (t(5, 4), p)), Sample(aten.normal.Tensor_float, (t(17, 4), 2.0))]
    found += [Sample(aten.multinomial.default, (pos(5, 4), 2)), Sample(aten.multinomial.default, (pos(5, 4), 3, True))]
    return [*found, Sample(aten.native_dropout.default, (t(5, 4), 0.3, True))]


def collectives(group: str) -> list[Sample]:
    """Over a group of two."""
    of, x = torch.ops.wholestep, t(6, 5)
    found = [Sample(of.all_reduce.default, (x, op, group)) for op in ("sum", "max", "avg")]
    found += [Sample(of.reduce_scatter.default, (x, op, group)) for op in ("sum", "max")]
    found += [Sample(of.broadcast.default, (x, 1, group)), Sample(of.all_gather.default, (x, group))]
    found += [Sample(of.all_to_all.default, (x, [], [], group)), Sample(of.share_rows.default, (x, group))]
    return [*found, Sample(of.wait.default, (x,))]
