import pickle
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apiece.errors import ApieceError
from apiece.importing import import_object
from apiece.models import MODELS, build
from apiece.models.cnn import image_shape
from apiece.params import Params
from apiece.random import as_key
from apiece.task import cross_entropy, hinge

CLASSIFIERS = ("admm_cnn", "cnn", "lenet", "logistic", "mlp", "svm", "tff_cnn")  # of one array of numbers


def shapes(task):
    return {name: tuple(t.shape) for name, t in task.init(0).items()}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, current; what was imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def write(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))


# The registered models


def test_every_model_is_listed_with_a_description():
    assert set(MODELS) == {*CLASSIFIERS, "din", "lstm"}
    assert all(entry.description for entry in MODELS.values())


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("input_shape", [(144,), (12, 12), (3, 12, 12)])
def test_every_model_scores_every_shape(name, input_shape):
    task = build(name, input_shape, 10)
    assert task.predict(task.init(1), torch.rand(5, *input_shape)).shape == (5, 10)
    assert task.predict(task.init(1), torch.rand(0, *input_shape)).shape == (0, 10)


def test_the_papers_networks_have_the_papers_sizes():
    """TFF's CNN: 320 + 18,496 + 1,179,776 + 7,998. LeNet-5: 156 + 2,416 + 48,120 + 10,164 + 5,270."""
    for name, size in (("tff_cnn", 1_206_590), ("lenet", 66_126)):
        assert sum(p.numel() for p in build(name, (28, 28), 62).init(0).values()) == size


@pytest.mark.parametrize("side", [28, 7, 6])
def test_admm_cnn_by_hand(side):
    """Windows of 3 at steps of 2 that are cut off at the edges, ⌈n/2⌉ of them; means after the last of three.

    They reach 2⌈n/2⌉ + 1 pixels: one beyond an even n, at its end, and two beyond an odd one, one at each.
    """
    task = build("admm_cnn(channels=(3, 4, 5), activation='leaky_relu')", (2, side, side), 3)
    w, x = moved(task.init(0)), torch.randn(6, 2, side, side)
    h = x
    for i, summary in enumerate((torch.amax, torch.amax, torch.mean), 1):
        h = torch.conv2d(h, w[f"conv{i}.weight"], w[f"conv{i}.bias"], padding=1)
        h = torch.where(h > 0, h, 0.2 * h)
        n = h.shape[-1]
        at = [range(max(0, begin), min(n, begin + 3)) for begin in range(-(n % 2), n - n % 2, 2)]
        rows = [[summary(h[..., r, :][..., c], dim=(-2, -1)) for c in at] for r in at]
        h = torch.stack([torch.stack(row, -1) for row in rows], -2)
    scores = h.flatten(1) @ w["head.weight"].T + w["head.bias"]
    torch.testing.assert_close(task.predict(w, x), scores)


def test_admm_cnns_of_the_paper():
    """Their dense layers take 3136, 2048 and 1024 numbers; weights are N(0, 0.1²) within 0.2, biases 0.1."""
    for options, shape, features in (
        ("", (1, 28, 28), 3136),
        ("(channels=(32, 64, 128), activation='leaky_relu')", (3, 32, 32), 2048),
        ("(channels=(32, 64, 128, 256))", (3, 32, 32), 1024),
    ):
        params = build(f"admm_cnn{options}", shape, 10).init(1)
        weight = params["head.weight"]
        assert weight.shape == (10, features)
        assert 0.15 < weight.abs().max() <= 0.2
        # Cut at two deviations, 0.88 of the deviation is left.
        assert weight.std().item() == pytest.approx(0.088, rel=0.03)
        assert (params["conv2.bias"] == 0.1).all()


@pytest.mark.parametrize("name", ["lenet", "tff_cnn"])
def test_an_image_too_small_for_a_network_is_told(name):
    with pytest.raises(ApieceError, match="pixels"):
        build(name, (3, 3), 10)


def test_logistic_is_one_matrix():
    """W·flatten(x) + b, under cross-entropy."""
    task = build("logistic", (2, 3), 4)
    params, x = task.init(0), torch.rand(5, 2, 3)
    expected = x.reshape(5, 6) @ params["head.weight"].T + params["head.bias"]
    torch.testing.assert_close(task.predict(params, x), expected)
    assert task.losses is cross_entropy


def test_svm_is_the_same_model_under_hinge_losses():
    task = build("svm", (6,), 4)
    assert shapes(task) == shapes(build("logistic", (6,), 4))
    assert task.losses is hinge


def test_mlp_by_hand():
    task = build("mlp(hidden=(5, 3))", (2, 2), 4)
    w, x = task.init(0), torch.randn(6, 2, 2)
    h = x.reshape(6, 4)
    for layer in ("hidden1", "hidden2"):
        h = (h @ w[f"{layer}.weight"].T + w[f"{layer}.bias"]).clamp(min=0)
    torch.testing.assert_close(task.predict(w, x), h @ w["head.weight"].T + w["head.bias"])


def test_mlp_sizes():
    assert shapes(build("mlp", (28, 28), 10))["hidden1.weight"] == (128, 784)
    assert shapes(build("mlp(hidden=256)", (784,), 10))["head.weight"] == (10, 256)
    assert set(shapes(build("mlp(hidden=())", (784,), 10))) == {"head.weight", "head.bias"}


def normalized(h, weight, bias):
    """Over all that belongs to an example; `weight` and `bias` are per channel."""
    flat = h.reshape(len(h), -1)
    flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    shape = (1, -1, *[1] * (h.ndim - 2))
    return flat.reshape(h.shape) * weight.reshape(shape) + bias.reshape(shape)


def moved(params):
    """Scales and shifts that are not 1 and 0."""
    return Params({name: p + 0.1 * torch.randn_like(p) for name, p in params.items()})


def test_mlp_with_normalization_by_hand():
    task = build("mlp(hidden=(5, 3), norm=True)", (2, 2), 4)
    w, x = moved(task.init(0)), torch.randn(6, 2, 2)
    h = x.reshape(6, 4)
    for i in ("1", "2"):
        h = h @ w[f"hidden{i}.weight"].T + w[f"hidden{i}.bias"]
        h = normalized(h, w[f"norm{i}.weight"], w[f"norm{i}.bias"]).clamp(min=0)
    torch.testing.assert_close(task.predict(w, x), h @ w["head.weight"].T + w["head.bias"])


def test_cnn_with_normalization_by_hand():
    task = build("cnn(channels=(4, 5), dense=7, norm=True)", (2, 7, 6), 3)
    w, x = moved(task.init(0)), torch.randn(4, 2, 7, 6)
    h = x
    for i in ("1", "2"):
        h = F.conv2d(h, w[f"conv{i}.weight"], w[f"conv{i}.bias"], padding=1)
        h = F.max_pool2d(normalized(h, w[f"norm{i}.weight"], w[f"norm{i}.bias"]).clamp(min=0), 2)
    h = h.reshape(4, 5) @ w["dense.weight"].T + w["dense.bias"]
    h = normalized(h, w["norm.weight"], w["norm.bias"]).clamp(min=0)
    torch.testing.assert_close(task.predict(w, x), h @ w["head.weight"].T + w["head.bias"])


def test_mlps_dropout_is_keyed():
    task = build("mlp(hidden=(64, 32), dropout=0.5)", (4,), 3)
    params, x = task.init(0), torch.rand(8, 4)
    torch.manual_seed(0)
    first = task.predict(params, x, as_key(1))
    assert torch.equal(first, task.predict(params, x, as_key(1)))
    assert not torch.equal(first, task.predict(params, x, as_key(2)))
    assert not torch.equal(first, task.predict(params, x))
    off = build("mlp(hidden=(64, 32))", (4,), 3)
    assert torch.equal(off.predict(params, x, as_key(1)), task.predict(params, x))


def test_cnn_by_hand():
    """7x6 pixels are pooled to 3x3 and then 1x1."""
    task = build("cnn(channels=(4, 5), dense=7)", (2, 7, 6), 3)
    w, x = task.init(0), torch.randn(4, 2, 7, 6)
    h = x
    for layer in ("conv1", "conv2"):
        h = F.max_pool2d(F.conv2d(h, w[f"{layer}.weight"], w[f"{layer}.bias"], padding=1).clamp(min=0), 2)
    h = (h.reshape(4, 5) @ w["dense.weight"].T + w["dense.bias"]).clamp(min=0)
    torch.testing.assert_close(task.predict(w, x), h @ w["head.weight"].T + w["head.bias"])


def test_cnn_sizes():
    """28 → 14 → 7 pixels on a side: 32·7·7 = 1568 numbers reach the dense layer."""
    assert shapes(build("cnn", (1, 28, 28), 62)) == {
        "conv1.weight": (16, 1, 3, 3),
        "conv1.bias": (16,),
        "conv2.weight": (32, 16, 3, 3),
        "conv2.bias": (32,),
        "dense.weight": (64, 1568),
        "dense.bias": (64,),
        "head.weight": (62, 64),
        "head.bias": (62,),
    }


def test_cnn_sees_flat_squares_as_images():
    flat, image = build("cnn", (64,), 10), build("cnn", (1, 8, 8), 10)
    x = torch.rand(3, 64)
    assert torch.equal(flat.predict(flat.init(0), x), image.predict(flat.init(0), x.reshape(3, 1, 8, 8)))


@pytest.mark.parametrize(
    ("given", "image"),
    [((3, 8, 9), (3, 8, 9)), ((8, 9), (1, 8, 9)), ((64,), (1, 8, 8)), ((1,), (1, 1, 1))],
)
def test_image_shapes(given, image):
    assert image_shape(given) == image


@pytest.mark.parametrize("shape", [(60,), (1, 2, 8, 8), ()])
def test_cnn_says_what_it_needs(shape):
    with pytest.raises(ApieceError, match=r"the model needs images.*\(channels, height, width\).*64 for 8x8"):
        build("cnn", shape, 10)


def test_cnn_needs_pixels_to_pool():
    with pytest.raises(ApieceError, match="at least 8x8 pixels, got 9x7"):
        build("cnn(channels=(1, 1, 1))", (9, 7), 10)


@pytest.mark.parametrize("name", ["mlp(dropout=0.5)", "cnn"])
def test_a_model_is_a_function_of_its_key(name):
    task, again = build(name, (64,), 10), build(name, (64,), 10)
    assert all(torch.equal(t, again.init(3)[n]) for n, t in task.init(3).items())


# Names and options


@pytest.mark.parametrize("name", [" mlp ", "mlp()", "mlp (dropout = 0.1)", "mlp(\n hidden=[7],\n)"])
def test_spellings(name):
    assert build(name, (4,), 3).module.hidden1.in_features == 4


def test_the_device_is_the_tasks():
    assert build("logistic", (4,), 3, "meta").device == torch.device("meta")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mpl", "unknown model 'mpl': did you mean 'mlp'"),
        ("resnet-18", "unknown model 'resnet-18'"),
        ("", "unknown model"),
        (
            "mlp(hiden=3)",
            r"unknown option of model 'mlp' 'hiden': did you mean 'hidden'.*known: dropout, hidden, norm$",
        ),
        ("mlp(classes=3)", "unknown option"),
        ("logistic(hidden=3)", "unknown option"),
        ("mlp(3)", "cannot read the options of model"),
        ("mlp(hidden=)", "cannot read the options of model"),
        ("mlp(hidden=width)", "cannot read the options of model"),
        ("mlp(**{'hidden': 3})", "cannot read the options of model"),
        ("mlp(hidden=3)(dropout=0.5)", "cannot read the options of model"),
        ("mlp(hidden=3, hidden=4)", "cannot read the options of model"),
        ("mlp(dropout=1.5)", r"cannot build model .*probability must lie in \[0, 1\), got 1.5"),
        ("mlp(hidden='a')", "cannot build model"),
        ("mlp(hidden=0)", "hidden layers of at least 1 unit, got hidden=0"),
        ("cnn(dense=-1)", "dense of at least 0"),
        ("admm_cnn(channels=(4, 0))", "channels of at least 1"),
        ("admm_cnn(activation='tanh')", "unknown activation 'tanh'"),
    ],
)
def test_wrong_names_and_options(name, message):
    with pytest.raises(ApieceError, match=message):
        build(name, (64,), 10)


# Factories of one's own


def test_a_factory_in_a_package_of_the_current_folder(folder):
    write(folder / "mine" / "__init__.py", "")
    write(
        folder / "mine" / "nets.py",
        """
        from torch import nn
        def net(classes, input_shape, width=5):
            return nn.Sequential(nn.Linear(*input_shape, width), nn.Linear(width, classes))
        """,
    )
    task = build("mine.nets:net", (6,), 4)
    assert shapes(task) == {"0.weight": (5, 6), "0.bias": (5,), "1.weight": (4, 5), "1.bias": (4,)}
    assert task.losses is cross_entropy


@pytest.mark.parametrize(
    ("signature", "body"),
    [
        ("", "nn.Linear(6, 4)"),
        ("classes", "nn.Linear(6, classes)"),
        ("*, input_shape", "nn.Linear(input_shape[0], 4)"),
        ("**given", "nn.Linear(given['input_shape'][0], given['classes'])"),
    ],
)
def test_a_factory_gets_what_it_accepts(folder, signature, body):
    write(folder / "net.py", f"from torch import nn\ndef make({signature}):\n    return {body}\n")
    assert shapes(build("net.py:make", (6,), 4)) == {"weight": (4, 6), "bias": (4,)}


def test_a_file_finds_its_neighbours_and_a_class_is_a_factory(folder):
    write(folder / "sub" / "neighbour_of_net.py", "WIDTH = 9\n")
    write(
        folder / "sub" / "net.py",
        """
        from dataclasses import dataclass
        from torch import nn
        from neighbour_of_net import WIDTH

        class Net(nn.Module):
            def __init__(self, classes):
                super().__init__()
                self.out = nn.Linear(WIDTH, classes)

            def forward(self, x):
                return self.out(x)
        """,
    )
    assert shapes(build(str(folder / "sub" / "net.py") + ":Net", (9,), 2))["out.weight"] == (2, 9)


def test_files_of_one_name_are_two_modules_and_each_is_run_once(folder):
    for name in ("a", "b"):
        write(folder / name / "net.py", f"from torch import nn\nname = {name!r}\nmake = object()\n")
    a, b = import_object("a/net.py:make", "model"), import_object("b/net.py:make", "model")
    assert a is not b
    assert import_object(str(folder / "a" / "net.py") + ":make", "model") is a
    assert import_object("b/net.py:name", "model") == "b"


def test_a_factory_travels_as_text(folder):
    write(folder / "net.py", "from torch import nn\ndef make(classes):\n    return nn.Linear(6, classes)\n")
    for name in ("net.py:make", "mlp(hidden=3)"):
        factory = build(name, (6,), 4).factory
        copy = pickle.loads(pickle.dumps(factory))
        assert copy == factory
        assert isinstance(copy(), nn.Module)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "no_such_module_here:f",
            "cannot import 'no_such_module_here'.*ModuleNotFoundError: No module named",
        ),
        ("missing.py:f", "cannot import 'missing.py'.*FileNotFoundError.*missing.py"),
        ("net:", "write package.module:name or path/to/file.py:name"),
        (":make", "write package.module:name or path/to/file.py:name"),
        ("broken.py:f", "cannot import 'broken.py'.*SyntaxError.*line 1"),
        ("raising:f", "cannot import 'raising'.*ZeroDivisionError: division by zero"),
        ("net:mak", "unknown model in net 'mak': did you mean 'make'"),
        ("net:number", "'net:number' is a int, not a factory"),
        ("net:ready", "'net:ready' is a Linear, not a factory"),
        ("net:nothing", "'net:nothing' must return a torch.nn.Module, got None"),
        ("net:a_list", "'net:a_list' must return a torch.nn.Module, got a list"),
        ("net:greedy", "'net:greedy' gets input_shape and classes.*missing a required.*depth"),
    ],
)
def test_mistakes_in_specs(folder, spec, message):
    write(folder / "broken.py", "def f(:\n")
    write(folder / "raising.py", "1 / 0\n")
    write(
        folder / "net.py",
        """
        from torch import nn
        number = 3
        ready = nn.Linear(2, 2)
        def make(): return nn.Linear(2, 2)
        def nothing(): pass
        def a_list(classes): return [classes]
        def greedy(classes, depth): return nn.Linear(2, 2)
        """,
    )
    with pytest.raises(ApieceError, match=message):
        build(spec, (2,), 2)


def test_a_module_that_failed_is_run_again_when_mended(folder):
    write(folder / "net.py", "1 / 0\n")
    with pytest.raises(ApieceError, match="ZeroDivisionError"):
        import_object("net.py:f", "model")
    write(folder / "net.py", "f = 'mended'\n")
    assert import_object("net.py:f", "model") == "mended"
