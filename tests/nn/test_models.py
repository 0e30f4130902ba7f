"""Each model against its formula, written out sample by sample, over the real collection."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from model_formulas import DIM, FORMULAS, Formula, ncf
from torch import Tensor

from rowhaul.data.samples import Samples
from rowhaul.errors import ConfigError, DataError
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, RowOptimizer
from rowhaul.nn.batch import Batch
from rowhaul.nn.models import MODELS, NeuMF, RecommendationModel, build_model
from rowhaul.optim import SGD

TABLES = {"users": ("user",), "items": ("item", "history"), "tags": ("tags",)}
IDS = {  # missing ids, several ids, one id twice in a bag, and an id shared between features
    "user": [[5], [-7], [5], [2**60], []],
    "item": [[1], [2], [1], [], [3]],
    "history": [[2, 3], [], [1, 1], [3, 2, 1], [9]],
    "tags": [[], [4, 4], [8], [6], []],
}
SMALL = {"hidden": (4, 3)}
OPTIONS: dict[str, Mapping[str, object]] = {
    "wide_deep": SMALL,
    "deepfm": SMALL,
    "dcn": SMALL | {"num_cross": 2},
    "dcn matrix": SMALL | {"num_cross": 2, "cross": "matrix"},
    "dcnv2": SMALL | {"num_cross": 2},
    "dcnv2 parallel": SMALL | {"num_cross": 2, "structure": "parallel"},
    "dcnv2 rank": SMALL | {"num_cross": 2, "rank": 2},
    "finalmlp": {"hidden": (4, 6), "second": (4,), "num_heads": 2, "gate": (3,)},
    "finalmlp context": {
        "hidden": (4,),
        "num_heads": 1,
        "first_context": ("user",),
        "second_context": ("tags", "item"),
    },
    "dlrm": {"bottom": (4,), "top": (5, 2)},
    "ncf": SMALL,
    "ncf named": SMALL | {"user": "tags", "item": "user"},
    "legacy": SMALL,
    "legacy sparse": SMALL | {"use_dense": False},
    "no layers": {"hidden": ()},
}
POOLED = [name for name, kind in MODELS.items() if kind.is_pooled and kind.least_tasks == 1]
CASES = [(case, num_dense) for case in OPTIONS for num_dense in (2, 0)]


def model_name(case: str) -> str:
    return "wide_deep" if case == "no layers" else case.split()[0]


def make_collection(configs: list[EmbeddingBagConfig]) -> EmbeddingBagCollection:
    wide = [
        replace(config, data_type=torch.float64, weight_init_min=-0.8, weight_init_max=0.8)
        for config in configs
    ]
    return EmbeddingBagCollection(wide, optimizer=SGD(lr=1.0), seed=3)


def make_model(case: str, num_dense: int, **more: object) -> RecommendationModel:
    return build_model(
        model_name(case),
        tables=TABLES,
        num_dense=num_dense,
        embedding_dim=DIM,
        make_collection=make_collection,
        seed=11,
        options=dict(OPTIONS[case]) | more,
    ).double()


def make_batch(num_dense: int, ids: Mapping[str, Sequence[Sequence[int]]] = IDS) -> Batch:
    bags = [bag for of_feature in ids.values() for bag in of_feature]
    count = len(next(iter(ids.values())))
    samples = Samples(
        features=tuple(ids),
        values=np.array([key for bag in bags for key in bag], dtype=np.int64),
        lengths=np.array([len(bag) for bag in bags], dtype=np.int32).reshape(len(ids), count),
        dense=np.linspace(-1, 2, count * num_dense, dtype=np.float32).reshape(count, num_dense),
        labels=None,
        index=np.arange(count, dtype=np.int64),
    )
    return Batch.from_samples(samples)


def read_rows(model: RecommendationModel, tables: Mapping[str, object]) -> dict[str, dict[int, Tensor]]:
    rows: dict[str, dict[int, Tensor]] = {table: {} for table in tables}
    for table in tables:
        for keys, records in model.collection.rows(table):
            rows[table] |= {int(key): torch.tensor(row) for key, row in zip(keys, records, strict=True)}
    return rows


def assert_matches(model: RecommendationModel, formula: Formula, tables: Mapping[str, Sequence[str]]) -> None:
    """Logits, gradients of dense weights and (as one step of SGD) of rows equal the formula's."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # biases too, which start at zero
        torch.nn.init.uniform_(parameter, -0.7, 0.7, generator=generator)
    batch = make_batch(model.num_dense)
    logits = model(batch)
    rows = read_rows(model, tables)
    for row in (row for of_table in rows.values() for row in of_table.values()):
        row.requires_grad_()
    widths = dict(zip(model.features, model.widths, strict=True))
    expected = []
    for sample in range(len(batch)):
        bags = [
            sum(
                (rows[table][key] for key in IDS[feature][sample]),
                torch.zeros(widths[feature], dtype=torch.float64),
            )
            for table, features in tables.items()
            for feature in features
        ]
        expected.append(formula(model, bags, batch.dense[sample].double()))

    assert logits.shape == (len(batch),)
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-10, atol=1e-12)

    scales = torch.arange(1.0, len(batch) + 1, dtype=torch.float64)
    leaves = list(model.parameters())
    of_rows = [row for of_table in rows.values() for row in of_table.values()]
    gradients = torch.autograd.grad(
        (torch.stack(expected) * scales).sum(), [*leaves, *of_rows], allow_unused=True
    )
    (logits * scales).sum().backward()
    for leaf, gradient in zip(leaves, gradients, strict=False):
        torch.testing.assert_close(leaf.grad, gradient, rtol=1e-9, atol=1e-11)
    RowOptimizer(model).step()
    stepped = [row for of_table in read_rows(model, tables).values() for row in of_table.values()]
    for before, gradient, after in zip(of_rows, gradients[len(leaves) :], stepped, strict=True):
        torch.testing.assert_close(after, before.detach() - gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("case", "num_dense"), CASES)
def test_logits_and_gradients_are_the_formulas(case: str, num_dense: int) -> None:
    assert_matches(make_model(case, num_dense), FORMULAS[case], TABLES)


def collection_of(widths: Mapping[str, int]) -> EmbeddingBagCollection:
    return make_collection(
        [
            EmbeddingBagConfig(embedding_dim=width, name=table, feature_names=list(TABLES[table]))
            for table, width in widths.items()
        ]
    )


@pytest.mark.parametrize("case", ["wide_deep", "dcn", "dcnv2", "legacy"])
def test_rows_may_differ_in_width(case: str) -> None:
    model = MODELS[case](
        collection_of({"users": 2, "items": 4, "tags": 3}), 2, MODELS[case].Options(**SMALL), 0
    )
    assert_matches(model.double(), FORMULAS[case], TABLES)


def test_neumf_only_needs_user_and_item_of_one_width() -> None:
    model = NeuMF(collection_of({"users": 6, "items": 6, "tags": 5}), 2, NeuMF.Options(**SMALL))
    assert_matches(model.double(), ncf, TABLES)


@pytest.mark.parametrize(("case", "num_dense"), CASES)
def test_no_samples_give_no_logits_and_zero_gradients(case: str, num_dense: int) -> None:
    model = make_model(case, num_dense)
    batch = make_batch(num_dense, {feature: [] for feature in IDS})
    logits = model(batch)
    assert logits.shape == (0,)
    replace(batch, global_size=4).loss(logits).backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    RowOptimizer(model).step()
    assert not any(read_rows(model, TABLES).values())


@pytest.mark.parametrize("case", [case for case in OPTIONS if case != "no layers"])
def test_dropout_belongs_to_the_sample(case: str) -> None:
    layers = "top" if case == "dlrm" else "hidden"
    model = make_model(case, 2, dropout=0.5, **{layers: (64,)})
    whole = make_batch(2)
    logits = model(whole)
    one_by_one = []
    for sample in (3, 0, 4, 1, 2):
        part = make_batch(2, {feature: [bags[sample]] for feature, bags in IDS.items()})
        pick = slice(sample, sample + 1)
        one_by_one.append(model(replace(part, dense=whole.dense[pick], index=whole.index[pick])))
    torch.testing.assert_close(torch.cat(one_by_one), logits[[3, 0, 4, 1, 2]], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(replace(whole, index=whole.index + 5)), logits)
    model.eval()
    assert torch.equal(model(replace(whole, index=whole.index + 5)), model(whole))


@pytest.mark.parametrize("name", POOLED)
def test_dense_weights_come_from_the_seed_alone(name: str) -> None:
    def made(seed: int) -> dict[str, Tensor]:
        model = build_model(
            name, tables=TABLES, num_dense=2, embedding_dim=4, make_collection=make_collection, seed=seed
        )
        return dict(model.named_parameters())

    before = torch.get_rng_state()
    first, again, other = made(1), made(1), made(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert first
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "resnet",
            {},
            "unknown model 'resnet'; known are wide_deep, deepfm, dcn, dcnv2, finalmlp, dlrm, ncf",
        ),
        ("DCN-v2", {}, r"unknown model 'DCN-v2' \(did you mean 'dcnv2'\?\); known are wide_deep"),
        ("dlrm", {"topp": (3,)}, r"no option 'topp' \(did you mean 'top'\?\)"),
        ("dcnv2", {"rank": -1}, "rank must be a whole number, 0 or more, got -1"),
        ("dcnv2", {"structure": "both"}, "structure must be one of stacked, parallel, got 'both'"),
        ("finalmlp", {"num_heads": 3}, "num_heads is 3, which must divide the last sizes of both MLPs, 128"),
        ("finalmlp", {"hidden": ()}, "FinalMLP needs hidden layers"),
        ("finalmlp", {"first_context": ["usr"]}, r"no id feature 'usr' for a gate \(did you mean 'user'\?\)"),
        ("finalmlp", {"first_context": 3}, "first_context must be a list of id features, got 3"),
        ("din", {"history": [1]}, r"history must be a list of id features, got \[1\]"),
        ("two_tower", {"item": 1}, "item must be a list of id features, got 1"),
        ("dlrm", {"hidden": (3,)}, "'dlrm' has no option 'hidden'; known are bottom, top, dropout"),
        ("deepfm", {"hidden": 3}, r"hidden must be a list of layer sizes such as \[256, 128\], got 3"),
        ("deepfm", {"hidden": [3, 0]}, r"hidden must be a list .* got \[3, 0\]"),
        ("dlrm", {"top": "12"}, "top must be a list of layer sizes .* got '12'"),
        ("legacy", {"dropout": 1}, "dropout must be at least 0 and below 1, got 1"),
        ("dlrm", {"dropout": "half"}, "dropout must be at least 0 and below 1, got 'half'"),
        ("dcn", {"num_cross": -1}, "num_cross must be a number of layers"),
        ("dcn", {"cross": "v2"}, "cross must be one of vector, matrix, got 'v2'"),
        ("ncf", {"user": "usr"}, "no id feature 'usr'; the id features are user, item, history, tags"),
        ("ncf", {"user": "item"}, "two different features"),
        ("legacy", {"embedding_dim": 0}, "embedding_dim must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_named_with_what_is_known(
    name: str, options: dict[str, object], message: str
) -> None:
    dim = options.pop("embedding_dim", 4)
    with pytest.raises(ConfigError, match=message):
        build_model(
            name,
            tables=TABLES,
            num_dense=2,
            embedding_dim=dim,
            make_collection=make_collection,
            seed=0,
            options=options,
        )


def test_lists_from_a_configuration_file_are_accepted() -> None:
    assert MODELS["dlrm"].Options(bottom=[8], top=[4, 2]).top == (4, 2)


@pytest.mark.parametrize(
    ("name", "widths", "message"),
    [
        ("deepfm", (3, 4, 3), "DeepFM needs rows of one width in all tables, got user: 3, item: 4"),
        ("dlrm", (3, 4, 3), "DLRM needs rows of one width"),
        ("ncf", (4, 6, 4), "'user' with 4 columns and item 'item' with 6"),
        ("ncf", (5, 5, 4), "rows of one even width"),
        ("wide_deep", (3, 3, 1), "the last column is the linear weight.*'tags' has rows of 1"),
    ],
)
def test_rows_that_a_model_cannot_use_are_refused(
    name: str, widths: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MODELS[name](collection_of(dict(zip(TABLES, widths, strict=True))), 2)


def test_models_that_cross_features_need_two_of_them() -> None:
    one = {"users": ("user",)}
    common = {"tables": one, "embedding_dim": 2, "make_collection": make_collection, "seed": 0}
    with pytest.raises(ConfigError, match="DLRM needs two vectors"):
        build_model("dlrm", num_dense=0, **common)
    with pytest.raises(ConfigError, match="NeuMF needs a user and an item feature; the id features are user"):
        build_model("ncf", num_dense=0, **common)


def test_a_batch_with_other_dense_columns_is_refused() -> None:
    with pytest.raises(DataError, match="built for 2 dense columns, the batch has 3"):
        make_model("dlrm", 2)(make_batch(3))


GUIDE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_guides_example_runs() -> None:
    snippet, *_ = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(snippet, names)
    assert names["logits"].shape == (2,)


@pytest.mark.parametrize("name", MODELS)
def test_the_guide_lists_every_option_with_its_default(name: str) -> None:
    section = GUIDE.read_text(encoding="utf-8").split(f"\n## `{name}`:")[1].split("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", section, re.MULTILINE))
    defaults = {field.name: field.default for field in fields(MODELS[name].Options)}
    assert {option: ast.literal_eval(default) for option, default in listed.items()} == defaults
