"""Networks of one's own: checked where they are written, and the catalogue's bytes where they are the catalogue's."""

import fedproj
import numpy as np
import pytest

SMALL = {"federation.rounds": 2, "local.epochs": 1}


def perceptron():
    net = fedproj.Graph((8, 8))
    net.flatten(name="flatten")
    net.relu(net.linear(8, name="fc1"))
    net.linear(name="fc2")
    return net


def test_a_perceptron_layer_by_layer_gives_the_catalogues_bytes(tmp_path):
    ours = fedproj.run(method="fedavg", settings={**SMALL, "model.hidden": [8]}, out=tmp_path / "a", progress=False)
    theirs = fedproj.run(method="fedavg", model=perceptron(), settings=SMALL, out=tmp_path / "b", progress=False)
    assert theirs.summary["model_hash"] == ours.summary["model_hash"]
    assert theirs.verify()["n_rounds"] == 2 and list(theirs.model()) == list(ours.model())


def test_shapes_are_known_while_a_graph_is_built():
    net = fedproj.Graph((8, 8, 3))
    assert net.conv2d(16, padding=1, stride=2).shape == (4, 4, 16)
    assert net.group_norm(4).shape == (4, 4, 16)
    assert net.max_pool().shape == (2, 2, 16) and net.dropout(0.1).shape == (2, 2, 16)
    assert net.flatten().shape == (64,) and net.gelu().shape == (64,)
    assert len(net.layers) == 6
    text = fedproj.Graph(tokens=16)
    text.embedding(8, vocabulary=100)
    text.attention(2)
    text.layer_norm()
    assert text.mean_of_tokens().shape == (8,)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("net.conv2d(4, kernel=9)", "node `conv2d1`"),
        ("net.linear(4)", "node `linear1`"),
        ("net.relu('nowhere')", "there is no layer `nowhere` before it"),
        ("net.add(['input'])", "needs two layers in `from`"),
        ("net.group_norm(2)", "node `group_norm1`"),
        ("net.dropout(1.5)", "node `dropout1`"),
        ("net.attention(2)", "node `attention1`"),
        ("net.conv2d(-4)", "integer `-4`, expected a whole number from 0 on"),
        ("net.conv2d(10**15)", "node `conv2d1`: is too large"),
        ("net.conv2d(4, padding=2**62)", "node `conv2d1`: is too large"),
        ("net.dropout(float('nan'))", "node `dropout1`: rate = nan: must be a finite number"),
        ("(net.relu(name='a'), net.relu(name='a'))", "a node of this name exists already"),
    ],
)
def test_the_line_that_does_not_fit_raises_the_exception(line, text):
    net = fedproj.Graph((8, 8, 3))
    with pytest.raises(fedproj.SettingsError) as raised:
        eval(line)
    assert text in str(raised.value)
    assert [layer["name"] for layer in net.layers] == (["a"] if "name='a'" in line else [])
    assert net.conv2d(4).shape == (6, 6, 4), "the graph is as it was before the line"


@pytest.mark.parametrize("sizes", [(-1,), (8, 0), (64.5,), "abc"])
def test_the_input_has_sizes(sizes):
    with pytest.raises(ValueError, match="whole numbers from 1 on, not"):
        fedproj.Graph(sizes)


def test_a_graph_for_other_samples_is_refused(tmp_path):
    net = fedproj.Graph((4,))
    net.linear()
    with pytest.raises(fedproj.SettingsError, match="node `linear1`"):
        fedproj.run(model=net, settings=SMALL, out=tmp_path / "a", progress=False)
    with pytest.raises(TypeError, match="model is the name of a network or a fedproj.Graph"):
        fedproj.run(model=3, settings=SMALL, out=tmp_path / "b", progress=False)


def test_a_torch_module_is_translated_with_its_weights(tmp_path):
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6)
            self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.GroupNorm(3, 6)
            self.pool, self.drop, self.fc1, self.fc2 = nn.MaxPool2d(2), nn.Dropout(0.3), nn.Linear(96, 12), nn.Linear(12, 10)

        def forward(self, x):
            x = torch.relu(self.bn1(self.conv1(x)))
            x = self.pool(x + self.norm2(self.conv2(x)))
            return self.fc2(nn.functional.gelu(self.fc1(self.drop(torch.flatten(x, 1)))))

    torch.manual_seed(0)
    module = Net()
    with torch.no_grad():
        module.bn1.running_mean.normal_()
        module.bn1.running_var.uniform_(0.5, 2.0)
    graph = fedproj.from_torch(module, (1, 8, 8))
    x = np.random.default_rng(0).normal(size=(40, 8, 8)).astype(np.float32)
    first = np.concatenate([module.bn1.running_mean.numpy(), module.bn1.running_var.numpy()])
    logits = []

    class Look(fedproj.Method):
        """Looks at the outputs of the model that the clients received: its weights, and its buffers as they were."""

        needs_public = True

        def fuse(self, server):
            server.buffers[:] = first
            logits.append(server.global_outputs().logits)

    settings = {**SMALL, "federation.rounds": 1, "data.partition": {"kind": "iid", "clients": 2}}
    data = fedproj.Dataset(x, np.arange(40) % 10, test=(x, np.arange(40) % 10), public=x)
    fedproj.run(data=data, model=graph, method=Look(), settings=settings, out=tmp_path / "a", progress=False)
    module.eval()
    with torch.no_grad():
        expected = module(torch.from_numpy(x)[:, None]).numpy()
    assert np.abs(logits[0] - expected).max() < 1e-5
