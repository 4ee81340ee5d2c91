"""Autograd functions that form per-record blocks inside the layer's one backward.

Each takes the session's anchor (a scalar that requires grad) so that its backward runs even where
nothing upstream is trained, and returns None for it: no weight gradient is formed, no second backward.
"""

from __future__ import annotations

from typing import Any

import torch

from fedlora.adapters.deferred import gram_squared_norms
from fedlora.adapters.session import TapSession
from fedlora.adapters.views import LayerView
from fedlora.names import CORE, LORA_A, LORA_B, TANGENT_IN, TANGENT_OUT, block_name


def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return x @ matrix for x (n, t, k) and matrix (k, m) or (n, k, m)."""
    if matrix.dim() == 2:
        return (x.reshape(-1, x.shape[2]) @ matrix).view(x.shape[0], x.shape[1], -1)
    return torch.bmm(x, matrix)


def add_product(base: torch.Tensor, h: torch.Tensor, matrix: torch.Tensor, scale: float) -> torch.Tensor:
    """Return base + scale * h @ matrix in one kernel; base (n, t, m), h (n, t, k)."""
    if matrix.dim() == 2:
        flat = torch.addmm(base.reshape(-1, base.shape[2]), h.reshape(-1, h.shape[2]), matrix, alpha=scale)
        return flat.view_as(base)
    return torch.baddbmm(base, h, matrix, alpha=scale)


def add_product_(base: torch.Tensor, h: torch.Tensor, matrix: torch.Tensor, scale: float) -> None:
    """Add scale * h @ matrix to a fresh, contiguous base (n, t, m) in place."""
    if matrix.dim() == 2:
        base.view(-1, base.shape[2]).addmm_(h.reshape(-1, h.shape[2]), matrix, alpha=scale)
    else:
        base.baddbmm_(h, matrix, alpha=scale)


def _t(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.transpose(-1, -2)


class LoraTap(torch.autograd.Function):
    """base + s (x D^T) U^T forward; per-record blocks of the view's kind backward."""

    @staticmethod
    def forward(
        ctx: Any,
        base: torch.Tensor,
        x: torch.Tensor,
        anchor: torch.Tensor,
        module: str,
        view: LayerView,
        session: TapSession,
    ) -> torch.Tensor:
        """Compute the adapted output; keep h (and x where an in-side block or a Gram norm needs it)."""
        view = view.to(base.dtype)
        with torch.autocast(device_type=base.device.type, enabled=False):
            rows = session.tokens(module, x.to(base.dtype))
            h = None if view.down is None else product(rows, _t(view.down))
            if h is None or view.up is None:
                out = base.clone() if h is None else base
            else:
                out = add_product(
                    base.reshape(rows.shape[0], rows.shape[1], -1), h, _t(view.up), view.scaling
                )
            probed = h if view.probe is None else product(rows, _t(view.probe))
        needs_x = view.kind in ("factors", "tangent", "projected")
        ctx.save_for_backward(probed, rows if needs_x else None)
        ctx.view, ctx.module, ctx.session = view, module, session
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Write the record blocks; return gradients for base output and input only."""
        view: LayerView = ctx.view
        session: TapSession = ctx.session
        h, x = ctx.saved_tensors
        g = grad.reshape(session.records.num_records, -1, grad.shape[-1])
        v = _collect(session, ctx.module, view, g, h, x)
        grad_x = None
        inner = inner_gradient(view, g, v) if ctx.needs_input_grad[1] else None
        if inner is not None and view.down is not None:
            inner = inner if view.scaling == 1.0 else inner * view.scaling
            grad_x = product(inner, view.down).view(ctx.x_shape).to(ctx.x_dtype)
        return (grad if ctx.needs_input_grad[0] else None), grad_x, None, None, None, None


class FusedLoraTap(torch.autograd.Function):
    """`LoraTap` with a frozen, unquantised base matrix inside: one node, and both gradients in one buffer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        module: str,
        view: LayerView,
        session: TapSession,
    ) -> torch.Tensor:
        """Compute x W^T + b + s (x D^T) U^T; weight is W (out, in), perhaps a transposed view."""
        view = view.to(x.dtype)
        rows = session.tokens(module, x)
        out = torch.nn.functional.linear(rows, weight, bias)
        h = None if view.down is None else product(rows, _t(view.down))
        if h is not None and view.up is not None:
            add_product_(out, h, _t(view.up), view.scaling)
        probed = h if view.probe is None else product(rows, _t(view.probe))
        needs_x = view.kind in ("factors", "tangent", "projected")
        ctx.save_for_backward(probed, rows if needs_x else None, weight)
        ctx.view, ctx.module, ctx.session, ctx.x_shape = view, module, session, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Write the record blocks; return the input's gradient."""
        view: LayerView = ctx.view
        session: TapSession = ctx.session
        h, x, weight = ctx.saved_tensors
        g = grad.reshape(session.records.num_records, -1, grad.shape[-1])
        v = _collect(session, ctx.module, view, g, h, x)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(g, weight)
            if view.down is not None:
                inner = inner_gradient(view, g, v)
                if inner is not None:
                    add_product_(grad_x, inner, view.down, view.scaling)
            grad_x = grad_x.view(ctx.x_shape)
        return grad_x, None, None, None, None, None, None


def inner_gradient(view: LayerView, g: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor | None:
    """Return g U, the gradient of h over s, from v = g V where that is known; None without an adapter."""
    if view.up is None:
        return None
    if view.kind == "tangent" and v is not None and view.core is not None:
        return product(v, view.core)
    return product(g, view.up) if v is None else v


def _collect(
    session: TapSession,
    module: str,
    view: LayerView,
    g: torch.Tensor,
    h: torch.Tensor,
    x: torch.Tensor | None,
) -> torch.Tensor | None:
    """Write this layer's blocks; return g V where it was needed (V = U, or Q_out for `tangent`)."""
    if view.kind == "lora_b":
        session.write(block_name(module, LORA_B), _t(g), h, view.scaling)
        return None
    if x is None:
        raise RuntimeError("the tap kept no input; this is a fault of fedlora")
    if view.kind == "factors" and view.up is not None:
        v = product(g, view.up)
        session.write(block_name(module, LORA_B), _t(g), h, view.scaling)
        session.write(block_name(module, LORA_A), _t(v), x, view.scaling)
        return v
    if view.kind == "tangent" and view.frame_out is not None:
        v = product(g, view.frame_out)
        session.write(block_name(module, TANGENT_OUT), _t(g), h)
        session.write(block_name(module, TANGENT_IN), _t(x), v)
        session.write(block_name(module, CORE), _t(v), h)
        return v
    session.write(block_name(module, LORA_B), _t(g), h)
    wide = session.accumulate
    session.keep_gram(block_name(module, LORA_B), gram_squared_norms(g.to(wide), x.to(wide)))
    return None


class LinearTap(torch.autograd.Function):
    """A trained Linear or Conv1D; keeps (g, x) for the weight and sums g for the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        anchor: torch.Tensor,
        module: str,
        transposed: bool,
        session: TapSession,
    ) -> torch.Tensor:
        """Compute x W^T + b with each client's own parameters."""
        weight = session.extras[block_name(module, "weight")]
        bias = session.extras.get(block_name(module, "bias"))
        matrix = weight if transposed else _t(weight)
        with torch.autocast(device_type=x.device.type, enabled=False):
            rows = session.tokens(module, x.to(weight.dtype))
            out = _per_client(rows, matrix, session)
            if bias is not None:
                own = session.records.gather(bias)
                out = out + (own if own.dim() == 1 else own.unsqueeze(1))
        ctx.save_for_backward(rows)
        ctx.args = (module, transposed, session, bias is not None)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Keep the factors of the weight's gradient; return the input's gradient."""
        module, transposed, session, has_bias = ctx.args
        (rows,) = ctx.saved_tensors
        g = grad.reshape(rows.shape[0], rows.shape[1], -1)
        session.keep_outer(block_name(module, "weight"), g, rows, transposed)
        if has_bias:
            session.write_rows(block_name(module, "bias"), g.to(session.accumulate).sum(1))
        grad_x = None
        if ctx.needs_input_grad[0]:
            weight = session.extras[block_name(module, "weight")]
            back = _per_client(g.to(weight.dtype), _t(weight) if transposed else weight, session)
            grad_x = back.view(ctx.x_shape).to(ctx.x_dtype)
        return grad_x, None, None, None, None


def _per_client(rows: torch.Tensor, matrix: torch.Tensor, session: TapSession) -> torch.Tensor:
    """Return rows @ matrix[client of row] for rows (records, tokens, k), matrix (K, k, m)."""
    records = session.records
    if records.num_clients == 1:
        return product(rows, matrix[0])
    padded = records.pad(rows)
    out = torch.bmm(padded.flatten(1, 2), matrix)
    return records.unpad(out.view(*padded.shape[:3], -1))


class AffineTap(torch.autograd.Function):
    """The trained scale and shift of a LayerNorm, given the normalised input."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, module: str, session: TapSession
    ) -> torch.Tensor:
        """Compute x * w + b with each client's own parameters."""
        weight = session.records.gather(session.extras[block_name(module, "weight")])
        rows = session.tokens(module, x.to(weight.dtype))
        scale = weight if weight.dim() == 1 else weight.unsqueeze(1)
        out = rows * scale
        bias = session.extras.get(block_name(module, "bias"))
        if bias is not None:
            own = session.records.gather(bias)
            out = out + (own if own.dim() == 1 else own.unsqueeze(1))
        ctx.save_for_backward(rows, scale)
        ctx.args = (module, session, bias is not None)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Write per-record gradients of scale and shift."""
        module, session, has_bias = ctx.args
        rows, scale = ctx.saved_tensors
        g = grad.reshape(rows.shape)
        wide = g.to(session.accumulate)
        session.write_rows(block_name(module, "weight"), (wide * rows.to(session.accumulate)).sum(1))
        if has_bias:
            session.write_rows(block_name(module, "bias"), wide.sum(1))
        grad_x = (g * scale).view(ctx.x_shape).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


class LookupTap(torch.autograd.Function):
    """A trained embedding table."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        anchor: torch.Tensor,
        module: str,
        padding_idx: int | None,
        session: TapSession,
    ) -> torch.Tensor:
        """Look ids up in each client's own table."""
        table = session.extras[block_name(module, "weight")]
        rows = ids
        if session.records.num_clients > 1:
            owner = (session.records.client * table.shape[1]).view(-1, *([1] * (ids.dim() - 1)))
            rows = ids + owner
        ctx.save_for_backward(ids)
        ctx.args = (module, padding_idx, session, table.shape[1])
        return torch.nn.functional.embedding(rows, table.flatten(0, 1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        """Keep the looked-up rows' gradients."""
        module, padding_idx, session, num_rows = ctx.args
        (ids,) = ctx.saved_tensors
        flat = ids.reshape(ids.shape[0], -1)
        g = grad.reshape(*flat.shape, grad.shape[-1])
        if padding_idx is not None:
            g = torch.where((flat == padding_idx).unsqueeze(2), 0.0, g)
        session.keep_lookup(block_name(module, "weight"), g, flat, num_rows)
        return None, None, None, None, None
