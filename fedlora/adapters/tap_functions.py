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
from fedlora.names import LORA_A, LORA_B, TANGENT_IN, TANGENT_OUT, block_name


def flat_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return x @ matrix for x (n t, k) and matrix (k, m), or (n, k, m) with one for each record."""
    if matrix.dim() == 2:
        return torch.mm(x, matrix)
    return torch.bmm(x.view(matrix.shape[0], -1, x.shape[1]), matrix).view(-1, matrix.shape[2])


def add_flat_product(base: torch.Tensor, h: torch.Tensor, matrix: torch.Tensor, scale: float) -> torch.Tensor:
    """Return base + scale * h @ matrix in one kernel; base (n t, m), matrix as in `flat_product`."""
    if matrix.dim() == 2:
        return torch.addmm(base, h, matrix, alpha=scale)
    records = matrix.shape[0]
    parts = base.view(records, -1, base.shape[1]), h.view(records, -1, h.shape[1])
    return torch.baddbmm(*parts, matrix, alpha=scale).view_as(base)


def add_flat_product_(base: torch.Tensor, h: torch.Tensor, matrix: torch.Tensor, scale: float) -> None:
    """Add scale * h @ matrix to a fresh, contiguous base (n t, m) in place; matrix as in `flat_product`."""
    if matrix.dim() == 2:
        base.addmm_(h, matrix, alpha=scale)
    else:
        records = matrix.shape[0]
        base.view(records, -1, base.shape[1]).baddbmm_(h.view(records, -1, h.shape[1]), matrix, alpha=scale)


def _t(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.transpose(-1, -2)


def exact_probe(x: torch.Tensor, probe: torch.Tensor, session: TapSession) -> torch.Tensor:
    """Return x P^T in the accumulation dtype, whatever the compute dtype.

    The norm is that of the gradient before its projection. Where tokens cancel in the gradient, rounding of the single
    tokens does not: a product in 16 bits would be longer than what was clipped.
    """
    return flat_product(x.to(session.accumulate), _t(probe).to(session.accumulate))


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
            flat = rows.reshape(-1, rows.shape[2])
            h = None if view.down is None else flat_product(flat, _t(view.down))
            if h is None or view.up is None:
                out = base.clone()
            else:
                out = add_flat_product(base.reshape(-1, base.shape[-1]), h, _t(view.up), view.scaling)
            probed = h if view.probe is None else exact_probe(flat, view.probe, session)
        _keep(ctx, session, module, view, probed, rows)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        return out.view(base.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Write the record blocks; return gradients for base output and input only."""
        view: LayerView = ctx.view
        h, x = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1])
        z = _collect(ctx.session, ctx.module, view, g, h, x)
        grad_x = None
        if ctx.needs_input_grad[1]:
            way = way_back(view, g, z)
            if way is not None:
                inner = way[0] if view.scaling == 1.0 else way[0] * view.scaling
                grad_x = flat_product(inner, way[1]).view(ctx.x_shape).to(ctx.x_dtype)
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
        flat = rows.reshape(-1, rows.shape[2])
        out = torch.nn.functional.linear(flat, weight, bias)
        h = None if view.down is None else flat_product(flat, _t(view.down))
        if h is not None and view.up is not None:
            add_flat_product_(out, h, _t(view.up), view.scaling)
        probed = h if view.probe is None else exact_probe(flat, view.probe, session)
        _keep(ctx, session, module, view, probed, rows, weight)
        ctx.x_shape = x.shape
        return out.view(*x.shape[:-1], out.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Write the record blocks; return the input's gradient."""
        view: LayerView = ctx.view
        h, x, weight = ctx.saved_tensors
        g = grad.reshape(-1, grad.shape[-1])
        z = _collect(ctx.session, ctx.module, view, g, h, x)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(g, weight)
            way = way_back(view, g, z)
            if way is not None:
                add_flat_product_(grad_x, way[0], way[1], view.scaling)
            grad_x = grad_x.view(ctx.x_shape)
        return grad_x, None, None, None, None, None, None


def _keep(
    ctx: Any,
    session: TapSession,
    module: str,
    view: LayerView,
    probed: torch.Tensor | None,
    rows: torch.Tensor,
    *more: torch.Tensor,
) -> None:
    """Save what the backward needs: the probed input, and the input itself for an in-side block or a Gram norm."""
    needs_x = view.kind in ("factors", "tangent", "projected")
    ctx.save_for_backward(probed, rows if needs_x else None, *more)
    ctx.view, ctx.module, ctx.session = view, module, session


def way_back(
    view: LayerView, g: torch.Tensor, z: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (z, M) with z M the adapter's gradient of its input over s; None without an adapter.

    z is g Q_out and M is S Q_in^T for `tangent`, where z is known already; else g U and D.
    """
    if view.up is None or view.down is None:
        return None
    if view.kind == "tangent" and z is not None and view.back is not None:
        return z, view.back
    return (flat_product(g, view.up) if z is None else z), view.down


def _collect(
    session: TapSession,
    module: str,
    view: LayerView,
    g: torch.Tensor,
    h: torch.Tensor,
    x: torch.Tensor | None,
) -> torch.Tensor | None:
    """Write this layer's blocks; return g V (n t, r) where it was needed (V = U, or Q_out for `tangent`).

    Args:
        session: where the blocks go.
        module: path of the layer.
        view: what is collected.
        g: (n t, out). SENSITIVE.
        h: (n t, r), the probed input. SENSITIVE.
        x: (n, t, in), where it was kept. SENSITIVE.
    """
    records = session.records.num_records
    outer, inner = g.view(records, -1, g.shape[1]), h.view(records, -1, h.shape[1])
    if view.kind == "lora_b":
        session.write(block_name(module, LORA_B), _t(outer), inner, view.scaling)
        return None
    if x is None:
        raise RuntimeError("the tap kept no input; this is a fault of fedlora")
    if view.kind == "factors" and view.up is not None:
        z = flat_product(g, view.up)
        session.write(block_name(module, LORA_B), _t(outer), inner, view.scaling)
        session.write(block_name(module, LORA_A), _t(z.view_as(inner)), x, view.scaling)
        return z
    if view.kind == "tangent" and view.frame_out is not None:
        z = flat_product(g, view.frame_out)
        session.write(block_name(module, TANGENT_OUT), _t(outer), inner)
        session.write(block_name(module, TANGENT_IN), _t(x), z.view_as(inner))
        return z
    wide = outer.to(session.accumulate)
    session.write(block_name(module, LORA_B), _t(wide), inner)
    session.keep_gram(block_name(module, LORA_B), gram_squared_norms(wide, x.to(session.accumulate)))
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
        return flat_product(rows.flatten(0, 1), matrix[0]).view(*rows.shape[:2], -1)
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
