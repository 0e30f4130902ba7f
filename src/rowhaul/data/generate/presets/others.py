"""Presets shaped like Avazu, MovieLens 1M and Taobao's ad display log."""

from __future__ import annotations

from rowhaul.data.generate.laws import LARGEST_SUPPORT, SkewLaw
from rowhaul.data.generate.naming import HexTokens, Integers, Listed, Words
from rowhaul.data.generate.spec import DenseField, Entity, IdField, Link, Preset


def _hex(name: str, entity: str, link: Link, law: SkewLaw, weight: float = 0.3) -> IdField:
    return IdField(name, law, HexTokens(name), entity, link, weight=weight)


def _code(name: str, entity: str, link: Link, law: SkewLaw, first: int = 0, weight: float = 0.3) -> IdField:
    return IdField(name, law, Integers(law.support, first), entity, link, weight=weight)


_AVAZU_SAMPLES = 36_386_071
_AVAZU_HOUR = _AVAZU_SAMPLES // 240 + 1  # samples: the log has 240 hours
_HOURS = Integers(24, scattered=False)
_AVAZU_USER = SkewLaw(LARGEST_SUPPORT, 1.3, 8_804.5)
_AVAZU_APP = SkewLaw(8_552, 1.8, 2.0, 0.64)
_AVAZU_AD = SkewLaw(2_626, 1.8, 30.0)

AVAZU = Preset(
    name="avazu",
    samples=_AVAZU_SAMPLES,
    label="click",
    base_rate=0.17,
    signal=1.0,
    affinity=0.35,
    tastes=16,
    lanes=512,
    session_length=1.1,
    markets=8,
    long_lanes=0.1,
    long_session=8.0,
    entities=(
        Entity("user", _AVAZU_USER, "session"),
        # 64 % of the samples are of a site and 36 % of an app; the other has its default value.
        Entity("page", SkewLaw(20_000, 1.4, 3.0, 0.36), "session", loyalty=0.3, local=0.8),
        Entity("app", _AVAZU_APP, "session", loyalty=0.3, opposite="page"),
        Entity("ad", _AVAZU_AD, "row", loyalty=0.4, local=0.8, kept=0.5),
    ),
    ids=(
        IdField("hour", SkewLaw(24, 0.5), _HOURS, link="clock", weight=0.0, clock_rows=_AVAZU_HOUR),
        _code("C1", "page", "popularity", SkewLaw(7, 3.5), first=1_001),
        _code("banner_pos", "page", "popularity", SkewLaw(7, 2.5), weight=0.6),
        _hex("site_id", "page", "popularity", SkewLaw(4_737, 1.8, 2.0, 0.36), weight=0.6),
        _hex("site_domain", "page", "popularity", SkewLaw(7_745, 1.8, 2.0, 0.37)),
        _hex("site_category", "page", "popularity", SkewLaw(26, 1.5), weight=0.6),
        _hex("app_id", "app", "popularity", _AVAZU_APP, weight=0.6),
        _hex("app_domain", "app", "popularity", SkewLaw(559, 2.3, 1.0, 0.67)),
        _hex("app_category", "app", "popularity", SkewLaw(36, 1.8, 1.0, 0.65)),
        _hex("device_id", "user", "popularity", SkewLaw(LARGEST_SUPPORT, 1.3, 46_696.1, 0.82)),
        _hex("device_ip", "user", "popularity", _AVAZU_USER),
        _hex("device_model", "user", "market", SkewLaw(8_251, 1.7, 20.0), weight=0.6),
        _code("device_type", "user", "market", SkewLaw(5, 2.0, 1.0, 0.9)),
        _code("device_conn_type", "user", "taste", SkewLaw(4, 2.0, 1.0, 0.8)),
        _code("C14", "ad", "popularity", _AVAZU_AD, first=375, weight=0.6),
        _code("C15", "ad", "popularity", SkewLaw(8, 2.0, 1.0, 0.93), first=120),
        _code("C16", "ad", "popularity", SkewLaw(9, 2.0, 1.0, 0.94), first=20),
        _code("C17", "ad", "popularity", SkewLaw(435, 1.8, 3.0), first=112, weight=0.6),
        _code("C18", "ad", "popularity", SkewLaw(4, 0.8), weight=0.6),
        _code("C19", "ad", "popularity", SkewLaw(68, 2.0), first=33),
        _code("C20", "ad", "popularity", SkewLaw(172, 2.0, 1.0, 0.47), first=100_000),
        _code("C21", "ad", "popularity", SkewLaw(60, 1.3), first=1, weight=0.6),
    ),
)

_GENRES = (
    "Drama", "Comedy", "Action", "Thriller", "Sci-Fi", "Romance", "Adventure", "Crime", "Horror",
    "Children's", "War", "Animation", "Musical", "Mystery", "Fantasy", "Film-Noir", "Western", "Documentary",
)  # fmt: skip
_AGES = (25, 35, 18, 45, 50, 56, 1)
_NUM_ZIPS = 5_150
_ZIPS = tuple(f"{(7 + 28_657 * position) % 99_991:05d}" for position in range(_NUM_ZIPS))
_VIEWER = SkewLaw(6_040, 1.5, 900.0)
_MOVIE = SkewLaw(3_706, 4.0, 1_100.0)

MOVIELENS = Preset(
    name="movielens",
    samples=1_000_209,
    label="liked",
    base_rate=0.575,
    signal=1.25,
    affinity=0.8,
    tastes=16,
    lanes=16,
    session_length=8.0,
    entities=(Entity("user", _VIEWER, "session"), Entity("movie", _MOVIE, "row", loyalty=0.4)),
    ids=(
        _code("user", "user", "popularity", _VIEWER, first=1, weight=0.8),
        _code("movie", "movie", "popularity", _MOVIE, first=1, weight=1.5),
        IdField("gender", SkewLaw(2, 1.5), Words(("M", "F")), "user", "independent"),
        IdField("age", SkewLaw(7, 0.8), Listed(_AGES), "user", "taste"),
        _code("occupation", "user", "taste", SkewLaw(21, 0.6)),
        IdField("zip", SkewLaw(_NUM_ZIPS, 0.4, 100.0), Words(_ZIPS), "user", "independent", weight=0.1),
        IdField("genres", SkewLaw(18, 0.7), Words(_GENRES), "movie", "taste", weight=0.6, values=3),
    ),
)

_SHOPPER = SkewLaw(1_250_000, 1.602, 107_330.0)
_TAOBAO_AD = SkewLaw(1_000_000, 1.138, 8.905)

TAOBAO = Preset(
    name="taobao",
    samples=26_557_961,
    label="clk",
    base_rate=0.0514,
    signal=1.0,
    affinity=0.6,
    tastes=64,
    lanes=512,
    session_length=3.0,
    entities=(Entity("user", _SHOPPER, "session"), Entity("ad", _TAOBAO_AD, "row", loyalty=0.5)),
    ids=(
        _code("user", "user", "popularity", _SHOPPER, first=1),
        _code("adgroup_id", "ad", "popularity", _TAOBAO_AD, first=1),
        IdField("pid", SkewLaw(2, 0.6), Words(("430548_1007", "430539_1007")), weight=0.6),
        _code("cms_segid", "user", "taste", SkewLaw(97, 0.4), weight=0.6),
        _code("cms_group_id", "user", "taste", SkewLaw(13, 0.4), weight=0.6),
        _code("final_gender_code", "user", "independent", SkewLaw(2, 0.5), first=1, weight=0.6),
        _code("age_level", "user", "independent", SkewLaw(7, 0.5), weight=0.6),
        IdField("pvalue_level", SkewLaw(3, 0.7), Integers(3, 1), "user", "independent", missing=0.54),
        _code("shopping_level", "user", "independent", SkewLaw(3, 2.5), first=1),
        _code("occupation", "user", "independent", SkewLaw(2, 3.0)),
        IdField("new_user_class_level", SkewLaw(4, 0.7), Integers(4, 1), "user", "independent", missing=0.28),
        _code("cate_id", "ad", "taste", SkewLaw(6_769, 1.3, 1.0), first=1, weight=0.6),
        _code("campaign_id", "ad", "popularity", SkewLaw(450_000, 1.138, 0.891), first=1),
        _code("customer", "ad", "popularity", SkewLaw(270_000, 1.321, 21.245), first=1, weight=0.6),
        IdField("brand", SkewLaw(99_815, 1.1, 5.0), Integers(99_815, 1), "ad", "popularity", missing=0.29),
    ),
    dense=(DenseField("price", 200.0, 0.9, entity="ad", decimals=2, weight=-0.5),),
)
