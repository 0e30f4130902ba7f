"""Presets shaped like Criteo's logs: Kaggle, Terabyte, Sponsored Search.

Kaggle and Terabyte publish only anonymous columns; which of them describe the user, the page or the
ad is our choice. Cardinalities are the published ones. Offsets of the open laws are solved so that the
expected number of distinct ids at the data set's size is the published cardinality.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rowhaul.data.generate.laws import LARGEST_SUPPORT, SkewLaw
from rowhaul.data.generate.naming import Digests, HexTokens
from rowhaul.data.generate.spec import DenseField, Entity, IdField, Link, Preset


def _tiny(cardinality: int) -> SkewLaw:
    return SkewLaw(cardinality, exponent=2.3)


def _small(cardinality: int) -> SkewLaw:
    return SkewLaw(cardinality, exponent=0.62, offset=210.0, head=0.4)


def _large(cardinality: int) -> SkewLaw:
    return SkewLaw(cardinality, exponent=1.2, offset=0.125, head=0.22)


def _open(exponent: float, offset: float) -> SkewLaw:
    return SkewLaw(LARGEST_SUPPORT, exponent, offset)


def _id(
    name: str, entity: str, link: Link, law: SkewLaw, missing: float = 0.0, weight: float = 0.3
) -> IdField:
    return IdField(name, law, HexTokens(name), entity, link, missing, weight)


def _digest(name: str, *rest: Any, **more: Any) -> IdField:
    return replace(_id(name, *rest, **more), naming=Digests(name))


_NUMBERS = (
    DenseField("I1", 1.0, 0.9, missing=0.45, weight=0.4),
    DenseField("I2", 6.0, 1.2, lowest=3.0, weight=0.1),
    DenseField("I3", 6.0, 1.1, missing=0.21, weight=0.1),
    DenseField("I4", 4.0, 0.6, missing=0.22, weight=0.1),
    DenseField("I5", 2_500.0, 1.3, missing=0.026, weight=-0.3),
    DenseField("I6", 33.0, 1.0, missing=0.22, weight=-0.3),
    DenseField("I7", 3.0, 1.1, missing=0.043, weight=0.3),
    DenseField("I8", 7.0, 0.7, weight=0.1),
    DenseField("I9", 38.0, 0.9, missing=0.043, weight=0.1),
    DenseField("I10", 0.6, 0.4, missing=0.45, weight=0.1),
    DenseField("I11", 1.0, 0.8, missing=0.043, weight=0.4),
    DenseField("I12", 0.3, 0.9, missing=0.76, weight=0.1),
    DenseField("I13", 4.0, 0.7, missing=0.22, weight=-0.2),
)

_KAGGLE_USER = _open(1.18, 1_241.6)
_KAGGLE_AD = _open(1.18, 3_105.4)

CRITEO = Preset(
    name="criteo",
    samples=41_256_556,
    label="label",
    base_rate=0.256,
    signal=1.4,
    affinity=0.45,
    tastes=32,
    lanes=256,
    session_length=1.25,
    markets=64,
    long_lanes=0.16,
    long_session=16.0,
    entities=(
        Entity("user", _KAGGLE_USER, "session"),
        Entity("page", SkewLaw(1_000_000, 1.05, 20.0), "session", local=1.0),
        Entity("ad", _KAGGLE_AD, "row", loyalty=0.3, local=1.0, kept=0.45),
    ),
    ids=(
        _id("C1", "page", "market", _small(1_461)),
        _id("C2", "page", "market", _tiny(584), weight=0.6),
        _id("C3", "ad", "popularity", _KAGGLE_AD, 0.034, weight=0.6),
        _id("C4", "ad", "popularity", _open(1.25, 6.196), 0.034, weight=0.6),
        _id("C5", "user", "market", _tiny(306)),
        _id("C6", "user", "market", _tiny(24), 0.12, weight=0.6),
        _id("C7", "page", "popularity", _small(12_518), weight=0.6),
        _id("C8", "user", "market", _tiny(634)),
        _id("C9", "page", "market", _tiny(4)),
        _id("C10", "page", "popularity", _large(93_146)),
        _id("C11", "user", "market", _small(5_684), weight=0.6),
        _id("C12", "ad", "popularity", _open(1.18, 894.7), 0.034),
        _id("C13", "ad", "popularity", _small(3_195), weight=0.6),
        _id("C14", "user", "market", _tiny(28), weight=0.6),
        _id("C15", "page", "independent", _small(14_993)),
        _id("C16", "ad", "popularity", _open(1.18, 55.25), 0.034),
        _id("C17", "ad", "taste", SkewLaw(11, 0.8), weight=0.6),
        _id("C18", "ad", "market", _small(5_653), weight=0.6),
        _id("C19", "page", "independent", _small(2_173), 0.44),
        _id("C20", "page", "market", _tiny(4), 0.44),
        _id("C21", "user", "popularity", _KAGGLE_USER, 0.034),
        _id("C22", "user", "market", _tiny(18), 0.76),
        _id("C23", "user", "taste", SkewLaw(16, 0.6), weight=0.6),
        _id("C24", "ad", "popularity", _large(286_181), 0.034),
        _id("C25", "page", "market", _tiny(105), 0.44),
        _id("C26", "page", "popularity", _large(142_572), 0.44),
    ),
    dense=_NUMBERS,
)

_TERABYTE_USER = _open(1.18, 444.8)
_TERABYTE_AD = _open(1.18, 646.5)

CRITEO_TERABYTE = replace(
    CRITEO,
    name="criteo-tb",
    samples=4_373_472_329,
    base_rate=0.034,
    lanes=1_024,
    entities=(
        Entity("user", _TERABYTE_USER, "session"),
        Entity("page", SkewLaw(10_000_000, 1.05, 20.0), "session", local=1.0),
        Entity("ad", _TERABYTE_AD, "row", loyalty=0.3, local=1.0, kept=0.45),
    ),
    ids=(
        _id("C1", "user", "popularity", _TERABYTE_USER, 0.03),
        _id("C2", "page", "popularity", _small(39_060), weight=0.6),
        _id("C3", "page", "independent", _small(17_295)),
        _id("C4", "page", "independent", _small(7_424), weight=0.6),
        _id("C5", "ad", "popularity", _small(20_265), weight=0.6),
        _id("C6", "page", "market", _tiny(3)),
        _id("C7", "user", "market", _small(7_122), weight=0.6),
        _id("C8", "user", "market", _tiny(1_543)),
        _id("C9", "user", "market", _tiny(63), weight=0.6),
        _id("C10", "ad", "popularity", _open(1.18, 1.835), 0.03),
        _id("C11", "ad", "popularity", SkewLaw(3_067_956, 1.2, 0.125, 0.22)),
        _id("C12", "page", "popularity", _large(405_282)),
        _id("C13", "page", "market", _tiny(10)),
        _id("C14", "user", "market", _tiny(2_209)),
        _id("C15", "ad", "market", _small(11_938), weight=0.6),
        _id("C16", "page", "market", _tiny(155)),
        _id("C17", "page", "market", _tiny(4)),
        _id("C18", "user", "market", _tiny(976)),
        _id("C19", "ad", "taste", SkewLaw(14, 0.8), weight=0.6),
        _id("C20", "ad", "popularity", _TERABYTE_AD, 0.03, weight=0.6),
        _id("C21", "ad", "popularity", _open(1.3, 3.097), 0.03, weight=0.6),
        _id("C22", "ad", "popularity", _open(1.18, 25.32), 0.03),
        _id("C23", "page", "popularity", _large(590_152)),
        _id("C24", "page", "independent", _small(12_973)),
        _id("C25", "user", "market", _tiny(108), 0.44),
        _id("C26", "user", "taste", SkewLaw(36, 0.6), weight=0.6),
    ),
)

_SEARCH_USER = _open(1.3, 935_333.6)
_SEARCH_PRODUCT = _open(1.3, 189.48)

CRITEO_SEARCH = Preset(
    name="criteo-search",
    samples=14_396_071,
    label="Sale",
    base_rate=0.105,
    signal=1.5,
    affinity=0.45,
    tastes=32,
    lanes=256,
    session_length=1.25,
    entities=(
        Entity("user", _SEARCH_USER, "session"),
        Entity("product", _SEARCH_PRODUCT, "row", loyalty=0.5),
    ),
    ids=(
        _digest("product_age_group", "product", "independent", _tiny(11), 0.7, weight=0.6),
        _digest("device_type", "user", "independent", SkewLaw(4, 1.5), weight=0.6),
        _digest("audience_id", "user", "taste", _small(16_000), 0.7, weight=0.6),
        _digest("product_gender", "product", "independent", _tiny(10), 0.7, weight=0.6),
        _digest("product_brand", "product", "popularity", _large(56_000), 0.45, weight=0.6),
        _digest("product_category1", "product", "taste", SkewLaw(21, 0.8), 0.37, weight=0.6),
        _digest("product_category2", "product", "taste", SkewLaw(180, 0.9, 3.0), 0.37, weight=0.6),
        _digest("product_category3", "product", "taste", SkewLaw(1_100, 0.9, 10.0), 0.4, weight=0.6),
        _digest("product_category4", "product", "taste", SkewLaw(1_900, 0.9, 10.0), 0.5, weight=0.6),
        _digest("product_category5", "product", "independent", SkewLaw(1_600, 1.2), 0.8),
        _digest("product_category6", "product", "independent", SkewLaw(500, 1.2), 0.95),
        _digest("product_category7", "product", "independent", SkewLaw(50, 1.2), 0.99),
        _digest("product_country", "user", "independent", SkewLaw(19, 1.5), weight=0.6),
        _digest("product_id", "product", "popularity", _SEARCH_PRODUCT),
        _digest("product_title", "product", "popularity", _open(1.3, 76.27)),
        _digest("partner_id", "product", "independent", SkewLaw(312, 1.3), weight=0.6),
        _digest("user_id", "user", "popularity", _SEARCH_USER),
    ),
    dense=(
        DenseField("nb_clicks_1week", 6.0, 1.1, missing=0.4, entity="product"),
        DenseField("product_price", 40.0, 0.8, entity="product", decimals=2, weight=-0.3),
    ),
)
