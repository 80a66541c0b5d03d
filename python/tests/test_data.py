"""Data from memory: the same bytes as from a file, and an exception for each thing that is wrong with it."""

import fedproj
import numpy as np
import pytest

SMALL = {"federation.rounds": 2, "local.epochs": 1, "model.hidden": [8]}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 6)).astype(np.float32)
Y = np.arange(120) % 3
IID = {"data.partition": {"kind": "iid", "clients": 4}}


def made(out, data, method="fedavg", **settings):
    return fedproj.run(data=data, method=method, settings={**SMALL, **settings}, out=out, progress=False)


def test_arrays_train_verify_and_are_known_by_their_content(tmp_path):
    run = made(tmp_path / "a", fedproj.Dataset(X, Y, test=(X[:30], Y[:30]), public=X[60:]), "fedproj", **IID)
    assert run.manifest["sizes"]["private_samples"] == 120 and run.manifest["sizes"]["public_samples"] == 60
    assert run.verify()["n_rounds"] == 2
    same = made(tmp_path / "b", fedproj.Dataset(X.copy(), Y.tolist(), test=(X[:30], Y[:30]), public=X[60:]), "fedproj", **IID)
    assert same.summary["model_hash"] == run.summary["model_hash"]
    assert len(list((tmp_path / "data").iterdir())) == 1, "equal content is written once"
    with pytest.raises(fedproj.SettingsError, match="another configuration"):
        made(tmp_path / "a", fedproj.Dataset(X + 1, Y, test=(X[:30], Y[:30]), public=X[60:]), "fedproj", **IID)


@pytest.mark.parametrize(
    "x",
    [
        X.astype(np.float64),
        np.asfortranarray(X),
        np.concatenate([X, X], axis=1)[:, :6],
        X[::-1][::-1],
        X.astype(">f4"),
        X.tolist(),
    ],
    ids=["double", "fortran", "strided", "reversed", "big-endian", "lists"],
)
def test_layout_and_type_of_an_array_do_not_matter(tmp_path, x):
    assert fedproj.Dataset(x, Y)._hash() == fedproj.Dataset(X, Y)._hash()
    hashes = {made(tmp_path / str(i), fedproj.Dataset(v, Y), **IID).summary["model_hash"] for i, v in enumerate([x, X])}
    assert len(hashes) == 1


def test_images_of_bytes_in_both_layouts(tmp_path):
    pixels = RNG.integers(0, 256, size=(60, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(60) % 2
    runs = [
        made(tmp_path / name, fedproj.Dataset(x, labels, layout=name), **IID, **{"model.name": "mlp"})
        for name, x in [("nhwc", pixels), ("nchw", np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))]
    ]
    assert runs[0].summary["model_hash"] == runs[1].summary["model_hash"]


def test_dlpack_and_array_protocols_are_read():
    class Lent:
        def __dlpack__(self, **kwargs):
            return X.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return X.__dlpack_device__()

    class Shown:
        def __array__(self, dtype=None, copy=None):
            return X

    assert fedproj.Dataset(Lent(), Y)._hash() == fedproj.Dataset(Shown(), Y)._hash() == fedproj.Dataset(X, Y)._hash()


def test_own_partitions(tmp_path):
    lists = [range(0, 50), np.arange(50, 60), list(range(60, 96))]
    run = made(tmp_path / "a", fedproj.Dataset(X[:96], Y[:96], test=(X[96:], Y[96:]), partition=lists))
    assert run.manifest["sizes"]["clients"] == 3
    assert [sum(counts) for counts in run.manifest["class_counts"]] == [50, 10, 36]
    with pytest.raises(fedproj.SettingsError, match="sample 3 is held by client 0 and again by client 1"):
        made(tmp_path / "b", fedproj.Dataset(X, Y, test=(X, Y), partition=[[3], [3]]))
    with pytest.raises(fedproj.SettingsError, match="method `fedproj` needs a public set"):
        made(tmp_path / "c", fedproj.Dataset(X, Y, test=(X, Y), partition=lists), "fedproj")


def test_texts_with_a_tokenizer(tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a"]
    vocabulary.write_text("\n".join(words + [f"[unused{i}]" for i in range(30522 - len(words))]) + "\n")
    texts = ["a good film", "a bad film"] * 20
    data = fedproj.Dataset(texts, [1, 0] * 20, test=(texts[:6], [1, 0] * 3), public=texts[:10], tokenizer=vocabulary)
    assert repr(data) == "<Dataset of 40 texts, 2 classes>"
    settings = {k: str(v) if "path" in k else v for k, v in data.save(tmp_path / "data").items()}
    planned = fedproj._run._plan(None, {**settings, "model.name": "bert-tiny"}, ["fedavg"], None)
    assert '"name":"text"' in planned[0].config()
    with pytest.raises(ValueError, match="texts need a tokenizer"):
        fedproj.Dataset(texts, [1, 0] * 20)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"x": X, "y": Y[:5]}, ValueError, "x: labels of shape (5,) for 120 samples"),
        ({"x": X, "y": np.where(np.arange(120) == 7, np.nan, Y)}, ValueError, "label nan of sample 7 is no class number"),
        ({"x": X, "y": Y - 1}, ValueError, "label -1 of sample 0"),
        ({"x": X, "y": Y + 0.5}, ValueError, "label 0.5 of sample 0"),
        ({"x": X, "y": [["a"]] * 120}, TypeError, "not texts; numpy.unique(y, return_inverse=True)[1]"),
        ({"x": X, "y": np.stack([Y, Y], axis=1)}, ValueError, "labels of shape (120, 2)"),
        ({"x": X[:, 0], "y": Y}, ValueError, "an array of shape (120,) holds no samples"),
        ({"x": X.reshape(120, 1, 1, 1, 6), "y": Y}, ValueError, "expected 2 to 4 dimensions"),
        ({"x": X.astype(object), "y": Y}, TypeError, "expected numbers, not object"),
        ({"x": X.astype(complex), "y": Y}, TypeError, "expected numbers, not complex128"),
        ({"x": np.where(np.arange(720).reshape(120, 6) == 13, np.nan, X), "y": Y}, ValueError, "sample 2 is not finite"),
        ({"x": np.full((120, 6), 1e300), "y": Y}, ValueError, "not finite in single precision"),
        ({"x": X[:0], "y": Y[:0]}, ValueError, "there is no sample"),
        ({"x": X, "y": Y, "test": X}, TypeError, "test is a pair (x, y)"),
        ({"x": X, "y": Y, "test": (X, None)}, ValueError, "a test set needs labels"),
        ({"x": X, "y": Y, "test": (X[:, :3], Y)}, ValueError, "test: samples of shape (3,), but x has samples of shape (6,)"),
        ({"x": X, "y": Y, "test": (X, Y + 1)}, ValueError, "test: label 3, but y has only classes 0 to 2"),
        ({"x": X, "y": Y, "public": X[:, :3]}, ValueError, "public: samples of shape (3,)"),
        ({"x": X, "y": Y, "partition": [[0]]}, ValueError, "give test=(x, y), too"),
        ({"x": X, "y": Y, "test": (X, Y), "partition": [[0], []]}, ValueError, "client 1 holds no sample"),
        ({"x": X, "y": Y, "test": (X, Y), "partition": [0, 1]}, TypeError, "client 0 needs a list of sample numbers"),
        ({"x": X, "y": Y, "test": (X, Y), "partition": [[0, 120]]}, ValueError, "client 0 holds a sample that is not among the 120"),
        ({"x": X, "y": Y, "test": (X, Y), "partition": [[0.5]]}, TypeError, "client 0 needs a list of sample numbers"),
    ],
)
def test_wrong_data_are_named_before_a_run_begins(arguments, error, text):
    with pytest.raises(error) as raised:
        fedproj.Dataset(**arguments)
    assert text in str(raised.value)
