"""The collection against TorchRec's own, where that is installed: names, values and gradients."""

import numpy as np
import pytest
import torch

torchrec = pytest.importorskip("torchrec", reason="parity with TorchRec needs torchrec and fbgemm-gpu-cpu")

from rowhaul import optim  # noqa: E402  # after the skip
from rowhaul.nn import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType, RowOptimizer  # noqa: E402  # after the skip

NUM_ROWS = 7


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_equals_torchrec(seed, is_weighted):
    random = np.random.default_rng(seed)
    features = ["a", "b", "c", "d"]
    layout = [("t0", 4, ["a", "c"]), ("t1", 8, ["b"]), ("t2", 4, ["d", "a"])]
    poolings = [random.choice(["SUM", "MEAN"]) if not is_weighted else "SUM" for _ in layout]
    theirs = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                num_embeddings=NUM_ROWS, embedding_dim=dim, name=name, feature_names=names,
                pooling=torchrec.PoolingType[pooling],
            )
            for (name, dim, names), pooling in zip(layout, poolings, strict=True)
        ],
        is_weighted=is_weighted,
    )  # fmt: skip
    ours = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                embedding_dim=dim, name=name, feature_names=names, pooling=PoolingType[pooling]
            )
            for (name, dim, names), pooling in zip(layout, poolings, strict=True)
        ],
        is_weighted=is_weighted,
        optimizer=optim.SGD(lr=0.5),
    )
    keys = np.arange(NUM_ROWS)
    for name, bag in theirs.embedding_bags.items():
        ours.load_rows(name, keys, bag.weight.detach().numpy())
    order = list(random.permutation(features))
    lengths = torch.tensor(random.integers(0, 4, 4 * 5))
    num_ids = int(lengths.sum())
    kjt = torchrec.KeyedJaggedTensor(
        keys=order,
        values=torch.tensor(random.integers(0, NUM_ROWS, num_ids)),
        weights=torch.tensor(random.normal(size=num_ids), dtype=torch.float32) if is_weighted else None,
        lengths=lengths,
    )
    expected, found = theirs(kjt), ours(kjt)  # a real TorchRec tensor, taken as it is
    assert list(found.keys()) == list(expected.keys())
    torch.testing.assert_close(found.values(), expected.values())
    for name in found.keys():  # noqa: SIM118  # not a dict
        torch.testing.assert_close(found[name], expected[name])

    direction = torch.randn_like(expected.values())
    (expected.values() * direction).sum().backward()
    (found.values() * direction).sum().backward()
    RowOptimizer(ours).step()
    for name, bag in theirs.embedding_bags.items():
        stepped = (bag.weight - 0.5 * bag.weight.grad).detach().numpy()
        width = stepped.shape[1]
        rows = {
            int(key): record[:width]
            for some, records in ours.rows(name)
            for key, record in zip(some, records, strict=True)
        }
        np.testing.assert_allclose(np.array([rows[key] for key in keys]), stepped, rtol=1e-5, atol=1e-6)
