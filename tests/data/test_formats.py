"""Every raw format, from hand-written lines as they stand in the true files."""

import gzip
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from rowhaul.data.formats import FORMATS, Options, open_format
from rowhaul.data.keys import hash_string
from rowhaul.data.schema import Schema
from rowhaul.data.text.reader import BadLines
from rowhaul.errors import BadLineError, ConfigError, DataError

KAGGLE = (
    "0\t1\t1\t5\t0\t1382\t4\t15\t2\t181\t1\t2\t\t2\t68fd1e64\t80e26c9b\tfb936136\t7b4723c4\t25c83c98\t7e0ccccf\t"
    "de7995b8\t1f89b562\ta73ee510\ta8cd5504\tb2cb9c98\t37c9c164\t2824a5f6\t1adce6ef\t8ba8b39a\t891b62e7\te5ba7672\t"
    "f54016b9\t21ddcdc9\tb1252a9d\t07b5194c\t\t3a171ecb\tc5c50484\te8b83407\t9727dd16\n"
    "1\t2\t-1\t44\t1\t102\t8\t2\t2\t4\t1\t1\t\t4\t68fd1e64\tf0cf0024\t6f67f7e5\t41274cd7\t25c83c98\tfe6b92e5\t"
    "922afcc0\t0b153874\ta73ee510\t2b53e5fb\t4f1b46f3\t623049e6\td7020589\tb28479f6\te6c5b5cd\tc92f3b61\t07c540c4\t"
    "b04e4670\t21ddcdc9\t5840adea\t60f6221e\t\t3a171ecb\t43f13e8b\te8b83407\t731c3655\n"
)
SEARCH = (
    "0\t-1\t-1\t1598925284\t-1\t0.0\t\t7E56C27BFF0305E788DA55A029EC4988\t-1\t-1\t-1\t"
    "57A1D462A03BD076E029CF9310C11FC5\t" + "-1\t" * 6 + "3DAC49BC6C8DB7D0BAB5AC5F5D3A5B4F\t"
    "57A1D462A03BD076E029CF9310C11FC5\tnike air max\t78B8DDD4D60A3DDFD0BA9E2D1B32EC02\tu1\n"
    "1\t35.5\t1400\t1596439471\t12\t19.99\tAdult\tphone\taud\tfemale\tbrand\tc1\tc2\t-1\t-1\t-1\t-1\t-1\tFR\tp2\t-1\t"
    "partner\tu2\n"
)
AVAZU_HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
    "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
)
AVAZU = (
    "1000009418151094273,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,"
    "ddd2926e,44956a24,1,2,15706,320,50,1722,0,35,-1,79\n"
    "1.00001693711892e+19,1,14103023,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,"
    "96809ac8,711ee120,1,0,15704,320,50,1722,0,35,100084,79\n"
)
ML_1M = {
    "ratings.dat": "1::1193::5::978300760\n1::661::3::978302109\n2::1193::4::978298413\n",
    "users.dat": "1::F::1::10::48067\n2::M::56::16::70072-1234\n",
    "movies.dat": "661::James and the Giant Peach (1996)::Animation|Children's|Musical\n"
    "1193::One Flew Over the Cuckoo's Nest, c\xe9l\xe8bre (1975)::Drama\n",
}
ML_25M = {
    "ratings.csv": "userId,movieId,rating,timestamp\n"
    "1,296,5.0,1147880044\n1,11,3.5,1147868817\n2,99,4.0,1141415820\n",
    "movies.csv": "movieId,title,genres\n296,Pulp Fiction (1994),Comedy|Crime|Drama|Thriller\n"
    '11,"American President, The (1995)",Comedy|Drama|Romance\n',
    "tags.csv": "userId,movieId,tag,timestamp\n3,260,classic,1439472355\n",
}
TAOBAO = {
    "raw_sample.csv": "user,time_stamp,adgroup_id,pid,nonclk,clk\n"
    "581738,1494137644,1,430548_1007,1,0\n449818,1494638778,3,430548_1007,1,0\n914836,1494000000,4,430539_1007,0,1\n",
    "user_profile.csv": "userid,cms_segid,cms_group_id,final_gender_code,age_level,pvalue_level,"
    "shopping_level,occupation,new_user_class_level \n914836,0,5,2,5,,3,0,3\n581738,0,13,1,6,2,3,0,\n",
    "ad_feature.csv": "adgroup_id,cate_id,campaign_id,customer,brand,price\n"
    "1,6261,83237,1,95471,170.0\n4,5628,73628,5,NULL,0.01\n",
}


@pytest.fixture
def write(tmp_path):
    def to_file(name: str, content: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode("latin-1" if name.endswith(".dat") else "utf-8")
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return to_file


@pytest.fixture
def folder(tmp_path, write):
    def of(files: dict[str, str]) -> Path:
        for name, content in files.items():
            write(f"set/{name}", content)
        return tmp_path / "set"

    return of


def read(name, *paths, **options):
    """The source and all of its rows."""
    source = open_format(name, list(paths), Options(**options))
    batches = [chunk.batch for chunk in source.chunks(None, BadLines(skip=False))]
    table = pa.Table.from_batches(batches)
    check_types(table, source.schema)
    return source, table.to_pylist()


def check_types(table: pa.Table, schema: Schema) -> None:
    if schema.label:
        assert table.schema.field(schema.label.name).type == pa.int8()
    assert all(table.schema.field(column.name).type == pa.float32() for column in schema.dense)
    assert all(
        table.schema.field(name).type in (pa.int64(), pa.list_(pa.int64())) for name in schema.features
    )


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_criteo_kaggle(write, name):
    source, rows = read("criteo", write(name, KAGGLE))
    assert [row["label"] for row in rows] == [0, 1]
    assert [rows[0][f"I{i}"] for i in range(1, 14)] == [1, 1, 5, 0, 1382, 4, 15, 2, 181, 1, 2, None, 2]
    assert rows[1]["I2"] == -1
    assert rows[0]["C1"] == 0x68FD1E64
    assert rows[1]["C26"] == 0x731C3655
    assert rows[0]["C22"] is None
    assert len(source.schema.ids) == 26
    assert {column.transform for column in source.schema.dense} == {"log1p"}


def test_criteo_test_file_has_no_label(write):
    unlabelled = "".join(line.split("\t", 1)[1] + "\n" for line in KAGGLE.splitlines())
    source, rows = read("criteo", write("test.txt", unlabelled))
    assert source.schema.label is None
    assert rows[0]["I1"] == 1
    assert rows[1]["C1"] == 0x68FD1E64
    with pytest.raises(DataError, match="differ in their number of columns"):
        read("criteo", write("train.txt", KAGGLE), write("test.txt", unlabelled))


def test_criteo_errors_name_line_and_column(write):
    with pytest.raises(BadLineError, match=r"train.txt, line 2: column I3: '44x' is not an integer"):
        read("criteo", write("train.txt", KAGGLE.replace("\t44\t", "\t44x\t")))
    with pytest.raises(BadLineError, match=r"line 3: 40 columns expected, 38 found"):
        read("criteo", write("train.txt", KAGGLE + "0" + "\t" * 37 + "\n"))
    with pytest.raises(BadLineError, match=r"line 1: 40 columns expected, 2 found"):
        read("criteo", write("other.txt", "hello\tworld\n"))


def test_criteo_days_are_read_in_order(write):
    days = [write(f"day_{day}.gz", f"1\t{day}" + "\t" * 38 + "\n") for day in (0, 1, 10, 2)]
    _, rows = read("criteo-tb", *days)
    assert [row["I1"] for row in rows] == [0, 1, 2, 10]


def test_criteo_search(write):
    source, rows = read("criteo-search", write("CriteoSearchData", SEARCH))
    assert len(source.schema.ids) == 17
    assert not {"SalesAmountInEuro", "time_delay_for_conversion"} & set(rows[0])
    assert [row["Sale"] for row in rows] == [0, 1]
    assert rows[0]["nb_clicks_1week"] is None
    assert rows[1]["product_price"] == pytest.approx(19.99)
    assert rows[0]["product_age_group"] is None
    assert rows[0]["audience_id"] is None
    assert rows[0]["product_title"] == hash_string("nike air max")
    assert rows[1]["user_id"] == hash_string("u2")
    assert rows[1]["product_country"] == hash_string("FR")


def test_avazu(write):
    source, rows = read("avazu", write("train.gz", AVAZU_HEADER + AVAZU))
    assert len(source.schema.ids) == 22
    assert [row["click"] for row in rows] == [0, 1]
    assert [row["hour"] for row in rows] == [0, 23]
    assert rows[0]["site_id"] == 0x1FBE01FE
    assert rows[1]["device_ip"] == 0x96809AC8
    assert [row["C20"] for row in rows] == [-1, 100084]
    assert "id" not in rows[0]


def test_avazu_test_file_and_bad_files(write):
    header = AVAZU_HEADER.replace("click,", "")
    rows = "".join(",".join(line.split(",")[:1] + line.split(",")[2:]) + "\n" for line in AVAZU.splitlines())
    source, read_rows = read("avazu", write("test.csv", header + rows))
    assert source.schema.label is None
    assert read_rows[1]["hour"] == 23
    with pytest.raises(BadLineError, match="line 3: column hour: 14103024 is not a time YYMMDDHH"):
        read("avazu", write("train.csv", (AVAZU_HEADER + AVAZU).replace("14103023", "14103024")))
    with pytest.raises(DataError, match="no column 'banner_pos'"):
        read("avazu", write("train.csv", AVAZU_HEADER.replace("banner_pos", "banner") + AVAZU))


@pytest.mark.parametrize("zipped", [False, True])
def test_movielens_1m(folder, tmp_path, zipped):
    path = folder(ML_1M)
    if zipped:
        with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for name in ML_1M:
                archive.write(path / name, f"ml-1m/{name}")
        path = tmp_path / "ml-1m.zip"
    source, rows = read("movielens", path)
    assert source.schema.features == ("user", "movie", "gender", "age", "occupation", "zip", "genres")
    assert [row["liked"] for row in rows] == [1, 0, 1]
    assert rows[1] == {
        "liked": 0,
        "user": 1,
        "movie": 661,
        "gender": hash_string("F"),
        "age": 1,
        "occupation": 10,
        "zip": hash_string("48067"),
        "genres": [hash_string("Animation"), hash_string("Children's"), hash_string("Musical")],
        "time": 978302109,
    }
    assert rows[2]["zip"] == hash_string("70072-1234")


def test_movielens_csv_with_an_unknown_movie(folder):
    source, rows = read("movielens", folder(ML_25M), positive_from=3.5)
    assert source.schema.features == ("user", "movie", "genres")
    assert [row["liked"] for row in rows] == [1, 1, 1]
    assert rows[1]["genres"] == [hash_string("Comedy"), hash_string("Drama"), hash_string("Romance")]
    assert not rows[2]["genres"]


def test_movielens_that_is_not(folder, tmp_path, write):
    with pytest.raises(DataError, match=r"holds no movies.csv"):
        read("movielens", folder({"ratings.csv": ML_25M["ratings.csv"]}))
    with pytest.raises(DataError, match="neither a folder nor a whole zip"):
        read("movielens", write("ml.zip", "not a zip"))
    with pytest.raises(DataError, match="no such file or folder"):
        read("movielens", tmp_path / "nothing")
    with pytest.raises(DataError, match="takes one input"):
        read("movielens", tmp_path, tmp_path)


def test_a_damaged_archive_is_named(folder, tmp_path):
    path = tmp_path / "ml.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in ML_25M.items():
            archive.writestr(f"ml/{name}", content)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"1147868817", b"1147868818"))
    with pytest.raises(DataError, match=r"ml.zip: ml/ratings.csv is damaged"):
        read("movielens", path)


def test_taobao(folder):
    source, rows = read("taobao", folder(TAOBAO))
    assert source.schema.features[:3] == ("user", "adgroup_id", "pid")
    first, unmatched, third = rows
    assert [row["clk"] for row in rows] == [0, 0, 1]
    assert first["pid"] == hash_string("430548_1007")
    assert (first["cms_group_id"], first["new_user_class_level"], first["brand"], first["price"]) == (
        13,
        None,
        95471,
        170,
    )
    assert (third["pvalue_level"], third["brand"], third["customer"]) == (None, None, 5)
    joined = {*source.schema.features[3:], "price"}
    assert {unmatched[name] for name in joined} == {None}


def test_taobao_side_tables_must_be_whole(folder):
    with pytest.raises(DataError, match="adgroup_id 1 has more than one row"):
        read("taobao", folder({**TAOBAO, "ad_feature.csv": TAOBAO["ad_feature.csv"] + "1,2,3,4,5,6\n"}))
    profile = TAOBAO["user_profile.csv"].replace("914836,0", "914836,x")
    words = r"user_profile.csv, line 2: column cms_segid: 'x' is not an integer"
    with pytest.raises(BadLineError, match=words):
        read("taobao", folder({**TAOBAO, "user_profile.csv": profile}))


CSV_SCHEMA = {
    "label": {"name": "rating", "positive_from": 4},
    "dense": ["age"],
    "ids": [
        {"name": "user"},
        {"name": "item", "type": "integer", "table": "items"},
        {"name": "seen", "type": "integer", "table": "items", "separator": "|"},
    ],
}


def test_any_csv_with_a_schema(write):
    data = '\ufeffunused,user,item,seen,age,rating\r\nx,"Ann, ""A""",7,1|2,30.5,5\r\ny,Bob,,,,3\r\n'
    source, rows = read("csv", write("log.csv", data), schema=Schema.from_dict(CSV_SCHEMA))
    assert rows == [
        {"rating": 1, "age": 30.5, "user": hash_string('Ann, "A"'), "item": 7, "seen": [1, 2]},
        {"rating": 0, "age": None, "user": hash_string("Bob"), "item": None, "seen": []},
    ]
    assert source.schema == Schema.from_dict(
        {
            "label": "rating",
            "dense": ["age"],
            "ids": [
                {"name": "user", "type": "string"},
                {"name": "item", "table": "items", "type": "integer"},
                {"name": "seen", "table": "items", "type": "integer"},
            ],
        }
    )


def test_csv_without_header_and_with_files_of_other_column_order(write):
    layout = {
        "csv": {"delimiter": "::", "header": False, "columns": ["rating", "user", "item", "seen", "age", "z"]}
    }
    schema = Schema.from_dict({**CSV_SCHEMA, **layout})
    _, rows = read("csv", write("log.dat", "4::u::1::2|3::1::zzz\n"), schema=schema)
    assert rows[0]["seen"] == [2, 3]
    first = write("a.csv", "user,item,seen,age,rating\nu,1,,2,5\n")
    second = write("b.csv", "rating,age,seen,item,user\n5,2,,1,u\n")
    _, rows = read("csv", first, second, schema=Schema.from_dict(CSV_SCHEMA))
    assert rows[0] == rows[1]


def test_names_in_quotes_may_contain_the_delimiter(write):
    for delimiter in ("::", ";"):
        name = f'a{delimiter}"b"'
        schema = Schema.from_dict({"ids": ["y", name], "csv": {"delimiter": delimiter}})
        quoted = '"' + name.replace('"', '""') + '"'
        path = write("log.csv", f'{quoted}{delimiter} "y" \n1{delimiter}2\n'.replace(' "y" ', '"y"'))
        assert read("csv", path, schema=schema)[1] == [{"y": 2, name: 1}]


def test_a_name_with_a_line_break_is_refused(write):
    for delimiter in ("::", ","):
        schema = Schema.from_dict({"ids": ["y"], "csv": {"delimiter": delimiter}})
        for header in ('y,"a\nb"', '"a\r\nb",y'):
            path = write("log.csv", f"{header}\n1,2\n".replace(",", delimiter))
            with pytest.raises(DataError, match=r"log.csv, line 1: a quote .* must be in the first line"):
                read("csv", path, schema=schema)
    path = write("log.csv", 'y,5" pipes\n1,2\n')  # a quote within a name opens nothing
    assert read("csv", path, schema=Schema.from_dict({"ids": ["y", '5" pipes']}))[1][0]["y"] == 1


@pytest.mark.parametrize(
    ("schema", "data", "words"),
    [
        ({"label": "y", "weight": "w"}, "1,1,2\n1,,2\n", "column w: the weight is missing"),
        ({"label": "y", "weight": "w"}, "1,1,2\n1,-0.5,2\n", "column w: -0.5 is not a finite number, 0 or"),
        ({"label": {"name": "y", "kind": "number"}}, "9,1,2\n,1,2\n", "column y: the label is missing"),
        ({"labels": ["y", "w"]}, ",1,2\n1,2,2\n", "column w: 2.0 is not 0 or 1"),
    ],
)
def test_what_training_refuses_is_a_bad_line(write, schema, data, words):
    schema, path = Schema.from_dict({**schema, "ids": ["a"]}), write("log.csv", "y,w,a\n" + data)
    with pytest.raises(BadLineError, match=rf"log.csv, line 3: {words}"):
        read("csv", path, schema=schema)
    bad_lines = BadLines(skip=True)
    chunks = list(open_format("csv", [path], Options(schema=schema)).chunks(None, bad_lines))
    assert (sum(chunk.batch.num_rows for chunk in chunks), bad_lines.count) == (1, 1)


def test_csv_that_does_not_fit_its_schema(write):
    schema = Schema.from_dict(CSV_SCHEMA)
    with pytest.raises(DataError, match=r"no column 'user' \(did you mean 'users'\?\)"):
        read("csv", write("log.csv", "users,item,seen,age,rating\n"), schema=schema)
    with pytest.raises(DataError, match=r"has no ',' but has ';'; .* \(csv: \{delimiter: \";\"\}\)"):
        read("csv", write("log.csv", "user;item;seen;age;rating\n"), schema=schema)
    with pytest.raises(DataError, match="2 columns called 'item'"):
        read("csv", write("log.csv", "user,item,item,seen,age,rating\n"), schema=schema)
    bad = Schema.from_dict({**CSV_SCHEMA, "csv": {"header": False, "columns": ["user", "item"]}})
    with pytest.raises(DataError, match="csv: `columns`: no column 'rating'"):
        read("csv", write("log.csv", "u,1\n"), schema=bad)
    for wrong, words in (({"delimiter": ""}, "delimiter"), ({"delimiter": '"'}, "delimiter")):
        with pytest.raises(DataError, match=words):
            read("csv", write("log.csv", "u,1\n"), schema=Schema.from_dict({**CSV_SCHEMA, "csv": wrong}))
    ids = Schema.from_dict({"ids": [{"name": "user", "separator": "||"}]})
    with pytest.raises(DataError, match="separator must be one ASCII character"):
        read("csv", write("log.csv", "user\n"), schema=ids)


def test_unknown_names_and_options(write):
    with pytest.raises(ConfigError, match=f"unknown format 'criteoo'; known are {', '.join(FORMATS)}"):
        open_format("criteoo", [], Options())
    with pytest.raises(ConfigError, match="format csv needs a schema"):
        open_format("csv", [write("log.csv", "a\n")], Options())
    with pytest.raises(ConfigError, match="criteo has no option positive_from; it is for movielens"):
        open_format("criteo", [write("log", "a\n")], Options(positive_from=3))
    with pytest.raises(DataError, match="no input file"):
        open_format("criteo", [], Options())
