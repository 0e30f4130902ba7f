"""Formulas of the models, written out sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rowhaul.nn.models import DeepFM, NeuMF, WideAndDeep

DIM = 3  # of an embedding


def total(numbers: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(numbers)).sum() if numbers else torch.zeros((), dtype=torch.float64)


def dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return total([a * b for a, b in zip(left, right, strict=True)])


def mlp(module: object, x: list[Tensor]) -> list[Tensor]:
    for linear in module.linears:
        x = [(dot(w, x) + b).clamp(min=0) for w, b in zip(linear.weight, linear.bias, strict=True)]
    return x


def head(linear: torch.nn.Linear, x: list[Tensor]) -> Tensor:
    return dot(linear.weight[0], x) + linear.bias[0]


def flat(vectors: Sequence[Tensor]) -> list[Tensor]:
    return [value for vector in vectors for value in vector]


Formula = Callable[..., Tensor]


def wide_deep(model: WideAndDeep, bags: list[Tensor], dense: Tensor) -> Tensor:
    linear = total([bag[-1] for bag in bags])
    if model.wide is not None:
        linear = linear + dot(model.wide.weight[0], dense)
    return linear + head(model.out, mlp(model.deep, flat([bag[:-1] for bag in bags]) + list(dense)))


def deepfm(model: DeepFM, bags: list[Tensor], dense: Tensor) -> Tensor:
    vectors = [bag[:-1] for bag in bags]
    logit = total([bag[-1] for bag in bags]) + head(model.out, mlp(model.deep, flat(vectors) + list(dense)))
    logit = logit + total([dot(vectors[i], vectors[j]) for i in range(len(vectors)) for j in range(i)])
    return logit if model.wide is None else logit + dot(model.wide.weight[0], dense)


def dcn(model: torch.nn.Module, bags: list[Tensor], dense: Tensor) -> Tensor:
    inputs = flat(bags) + list(dense)
    crossed = inputs
    for weight, bias in zip(model.cross_weights, model.cross_biases, strict=True):
        if model.cross == "vector":
            scale = dot(weight[0], crossed)
            crossed = [x0 * scale + b + x for x0, b, x in zip(inputs, bias, crossed, strict=True)]
        else:
            scales = [dot(row, crossed) + b for row, b in zip(weight, bias, strict=True)]
            crossed = [x0 * scale + x for x0, scale, x in zip(inputs, scales, crossed, strict=True)]
    return head(model.out, crossed + mlp(model.deep, inputs))


def dcnv2(model: torch.nn.Module, bags: list[Tensor], dense: Tensor) -> Tensor:
    inputs = flat(bags) + list(dense)
    crossed = inputs
    for layer, cross in enumerate(model.cross):
        weight = cross.weight @ model.narrow[layer].weight if len(model.narrow) else cross.weight
        scales = [dot(row, crossed) + b for row, b in zip(weight, cross.bias, strict=True)]
        crossed = [x0 * scale + x for x0, scale, x in zip(inputs, scales, crossed, strict=True)]
    if model.is_stacked:
        return head(model.out, mlp(model.deep, crossed))
    return head(model.out, crossed + mlp(model.deep, inputs))


def finalmlp(model: torch.nn.Module, bags: list[Tensor], dense: Tensor) -> Tensor:
    inputs, streams = flat(bags) + list(dense), []
    for gate, deep in ((model.first_gate, model.first), (model.second_gate, model.second)):
        read = [bags[place] for place in gate.places] if gate.constant is None else [gate.constant[0]]
        hidden = mlp(gate.mlp, flat(read))
        gates = [
            2 / (1 + torch.exp(-(dot(w, hidden) + b)))
            for w, b in zip(gate.out.weight, gate.out.bias, strict=True)
        ]
        streams.append(mlp(deep, [gate * x for gate, x in zip(gates, inputs, strict=True)]))
    first, second = streams
    logit = head(model.first_out, first) + dot(model.second_out.weight[0], second)
    rows, columns = len(first) // model.num_heads, len(second) // model.num_heads
    for h in range(model.num_heads):
        for i in range(rows):
            for j in range(columns):
                place = h * rows + i
                logit = logit + first[place] * model.product[place, j] * second[h * columns + j]
    return logit


def dlrm(model: torch.nn.Module, bags: list[Tensor], dense: Tensor) -> Tensor:
    bottom = mlp(model.bottom, list(dense)) if len(dense) else []
    vectors = [bottom] * bool(bottom) + [list(bag) for bag in bags]
    dots = [dot(vectors[i], vectors[j]) for i in range(len(vectors)) for j in range(i)]
    return head(model.out, mlp(model.top, bottom + dots))


def ncf(model: NeuMF, bags: list[Tensor], dense: Tensor) -> Tensor:
    return neumf(model, bags, dense, user=0, item=1)


def ncf_named(model: NeuMF, bags: list[Tensor], dense: Tensor) -> Tensor:
    return neumf(model, bags, dense, user=3, item=0)


def neumf(model: NeuMF, bags: list[Tensor], dense: Tensor, user: int, item: int) -> Tensor:
    factors = [a * b for a, b in zip(bags[user][:DIM], bags[item][:DIM], strict=True)]
    inputs = [bag[DIM:] if position in (user, item) else bag for position, bag in enumerate(bags)]
    return head(model.out, factors + mlp(model.mlp, flat(inputs) + list(dense)))


def legacy(model: torch.nn.Module, bags: list[Tensor], dense: Tensor) -> Tensor:
    return head(model.out, mlp(model.mlp, flat(bags) + list(dense)))


def legacy_sparse(model: torch.nn.Module, bags: list[Tensor], dense: Tensor) -> Tensor:
    return legacy(model, bags, dense[:0])


FORMULAS: dict[str, Formula] = {
    "wide_deep": wide_deep,
    "deepfm": deepfm,
    "dcn": dcn,
    "dcn matrix": dcn,
    "dcnv2": dcnv2,
    "dcnv2 parallel": dcnv2,
    "dcnv2 rank": dcnv2,
    "finalmlp": finalmlp,
    "finalmlp context": finalmlp,
    "dlrm": dlrm,
    "ncf": ncf,
    "ncf named": ncf_named,
    "legacy": legacy,
    "legacy sparse": legacy_sparse,
    "no layers": wide_deep,
}
