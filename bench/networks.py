"""The networks of `fedproj models` in plain PyTorch, for the peers' side of the benchmarks."""
import torch
from torch import nn
from torch.nn import functional as F

IMAGE = (3, 32, 32)
CLASSES = 10
WORDS = 30_522

# Channels of each stage, blocks per stage, and whether a max-pool follows the first convolution.
RESNETS = {
    "resnet8": ([64, 128, 256], 1, True),
    "resnet8-thin": ([16, 32, 64], 1, False),
    "resnet10": ([64, 128, 256, 512], 1, True),
    "resnet18": ([64, 128, 256, 512], 2, True),
}
NAMES = [*RESNETS, "cnn", "minilm-l3"]


def conv(channels_in, channels, size, stride=1):
    """A convolution without bias and its batch-norm."""
    layer = nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(channels))


class Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.first = conv(channels_in, channels, 3, stride)
        self.second = conv(channels, channels, 3)
        same = channels_in == channels and stride == 1
        self.shortcut = nn.Identity() if same else conv(channels_in, channels, 1, stride)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def resnet(stages, blocks, pool):
    layers = [conv(3, stages[0], 3), nn.ReLU()] + [nn.MaxPool2d(3, 2, 1)] * pool
    channels_in = stages[0]
    for stage, channels in enumerate(stages):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Residual(channels_in, channels, stride))
            channels_in = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, CLASSES))


def cnn():
    """The network of the pfl-research CIFAR-10 benchmark."""
    features = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    head = [nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, CLASSES)]
    return nn.Sequential(*features, *head)


class Encoder(nn.Module):
    """MiniLM-L3 from PyTorch's own encoder layers; the mean of the tokens goes to a classifier."""

    def __init__(self, dropout, hidden=384, heads=12, intermediate=1536, layers=3, positions=512):
        super().__init__()
        self.word = nn.Embedding(WORDS, hidden)
        self.position = nn.Embedding(positions, hidden)
        self.token_type = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        sizes = dict(d_model=hidden, nhead=heads, dim_feedforward=intermediate, dropout=dropout)
        kind = dict(activation="gelu", layer_norm_eps=1e-12, batch_first=True)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**sizes, **kind) for _ in range(layers))
        self.classifier = nn.Linear(hidden, CLASSES)

    def forward(self, ids, padding=None):
        """`padding` is true where a text has ended; None if all texts have one length."""
        x = self.word(ids) + self.position.weight[: ids.shape[1]] + self.token_type.weight[0]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        if padding is None:
            mean = x.mean(1)
        else:
            keep = (~padding).to(x).unsqueeze(2)
            mean = (x * keep).sum(1) / keep.sum(1)
        return self.classifier(self.dropout(mean))


def build(name, dropout=0.1):
    """A network by its name; `dropout` is the encoder's rate."""
    if name == "cnn":
        return cnn()
    if name == "minilm-l3":
        return Encoder(dropout)
    return resnet(*RESNETS[name])


def images(n, device="cpu"):
    return torch.randn(n, *IMAGE, device=device)


def labels(n, device="cpu"):
    return torch.randint(0, CLASSES, (n,), device=device)
