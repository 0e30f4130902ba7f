"""Taobao's ad display and click log: impressions joined with user profiles and ad features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rowhaul.data.formats.header import one_path, with_header
from rowhaul.data.formats.side_table import make_join
from rowhaul.data.formats.source import Options, TextInput, TextSource
from rowhaul.data.schema import DenseColumn, IdColumn, LabelColumn, Schema
from rowhaul.data.text.blocks import TextFile
from rowhaul.data.text.layout import fields

_MISSING = "NULL"
PROFILE = (
    *("cms_segid", "cms_group_id", "final_gender_code", "age_level", "pvalue_level", "shopping_level"),
    *("occupation", "new_user_class_level"),
)
AD = ("cate_id", "campaign_id", "customer", "brand")


def open_taobao(inputs: Sequence[Path], options: Options) -> TextSource:
    """A folder with raw_sample.csv, user_profile.csv and ad_feature.csv."""
    folder = one_path(inputs, "taobao", "the folder with raw_sample.csv, user_profile.csv and ad_feature.csv")
    integers = ("user", "time_stamp", "adgroup_id")
    samples = _open(folder / "raw_sample.csv", integers, pid="string", clk="label")
    profiles = _open(folder / "user_profile.csv", ("userid", *PROFILE))
    ads = _open(folder / "ad_feature.csv", ("adgroup_id", *AD), price="number")
    sides = [(profiles, "userid", "user"), (ads, "adgroup_id", "adgroup_id")]
    features = ("user", "adgroup_id", "pid", *PROFILE, *AD)
    return TextSource(
        (samples,),
        Schema(
            label=LabelColumn("clk"),
            dense=(DenseColumn("price", "log1p"),),
            ids=tuple(IdColumn(name, type="string" if name == "pid" else "integer") for name in features),
        ),
        make_derive=lambda seed: make_join(sides, seed),
        time_column="time_stamp",
        side_files=(profiles.file.path, ads.file.path),
    )


def _open(path: Path, integers: Sequence[str], **others: str) -> TextInput:
    columns = fields(**dict.fromkeys(integers, "integer"), **others)
    return with_header(TextFile(path), {field.name: field for field in columns}, missing=_MISSING)
