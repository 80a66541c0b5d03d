"""PyTorch's training step (forward, backward, Adam) of MiniLM-L3 on synthetic texts. Prints one JSON line.

python3 torch_encoder.py --batch 32 --length 64 --threads 1 [--lengths sst2] [--no-dropout] [--steps 20]
The encoder is PyTorch's own nn.TransformerEncoderLayer, with the sizes of MiniLM-L3 (3 layers, 384 hidden, 12 heads, 1536
intermediate, 30 522 words), the mean of the tokens and a classifier. Short texts are padded to the longest of the batch.
"""
import argparse, json, time
import torch
import torch.nn as nn
import torch.nn.functional as F

# Tokens of SST-2's training sentences: the quantiles at 1/64, 3/64 ... 63/64, as ours.
SST2 = [3, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 8, 8, 9, 9, 10, 11, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 29, 34, 42]

a = argparse.ArgumentParser()
a.add_argument("--model", default="minilm-l3", choices=["minilm-l3"])
a.add_argument("--batch", type=int, default=32)
a.add_argument("--length", type=int, default=64)
a.add_argument("--lengths", default="full", choices=["full", "sst2"])
a.add_argument("--no-dropout", action="store_true")
a.add_argument("--threads", type=int, default=1)
a.add_argument("--steps", type=int, default=20)
a = a.parse_args()
torch.set_num_threads(a.threads)
rate = 0.0 if a.no_dropout else 0.1


class Encoder(nn.Module):
    def __init__(self, hidden=384, heads=12, intermediate=1536, layers=3, words=30522, positions=512, classes=10):
        super().__init__()
        self.word, self.position = nn.Embedding(words, hidden), nn.Embedding(positions, hidden)
        self.kind = nn.Embedding(2, hidden)
        self.norm, self.drop = nn.LayerNorm(hidden, eps=1e-12), nn.Dropout(rate)
        layer = lambda: nn.TransformerEncoderLayer(
            hidden, heads, intermediate, rate, "gelu", layer_norm_eps=1e-12, batch_first=True
        )
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, ids, padding):
        x = self.word(ids) + self.position.weight[: ids.shape[1]] + self.kind.weight[0]
        x = self.drop(self.norm(x))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        if padding is None:
            return self.classifier(self.drop(x.mean(1)))
        keep = (~padding).to(x)[:, :, None]
        return self.classifier(self.drop((x * keep).sum(1) / keep.sum(1)))


lengths = [a.length] * a.batch if a.lengths == "full" else [min(SST2[i % 32], a.length) for i in range(a.batch)]
longest = max(lengths)
ids = torch.randint(0, 30522, (a.batch, longest))
padding = None
if min(lengths) < longest:
    padding = torch.arange(longest)[None, :] >= torch.tensor(lengths)[:, None]
y = torch.randint(0, 10, (a.batch,))
model = Encoder().train()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
times = []
for _ in range(a.steps):
    t = time.perf_counter()
    opt.zero_grad()
    F.cross_entropy(model(ids, padding), y).backward()
    opt.step()
    times.append(time.perf_counter() - t)
times = sorted(times[a.steps // 3 :])
step = times[len(times) // 2]
print(json.dumps({"peer": f"torch {torch.__version__}", "model": a.model, "batch": a.batch, "length": a.length,
                  "lengths": a.lengths, "threads": a.threads, "ms_per_step": round(step * 1e3, 3),
                  "samples_per_second": round(a.batch / step, 1)}))
