"""A small click log with something to learn, for tests that need files."""

import numpy as np
import pyarrow as pa


def click_log(num_samples, seed):
    """A log whose clicks depend on user, item and price; tags are multi-valued and sometimes empty."""
    random = np.random.default_rng(seed)
    user = random.zipf(1.3, num_samples) % 200
    item = random.zipf(1.2, num_samples) % 300
    price = random.normal(size=num_samples)
    taste = np.random.default_rng(99).normal(size=(200, 2))
    kind = np.random.default_rng(98).normal(size=(300, 2))
    logit = (taste[user] * kind[item]).sum(1) + price
    tags = [random.integers(0, 20, size=n).tolist() for n in random.integers(0, 4, num_samples)]
    return pa.table(
        {
            "click": (random.random(num_samples) < 1 / (1 + np.exp(-logit))).astype(np.int8),
            "price": price.astype(np.float32),
            "user": user.astype(np.int64) * 7919,
            "item": pa.array([f"item-{number}" for number in item]),
            "tags": pa.array(tags, type=pa.list_(pa.int64())),
        }
    )
