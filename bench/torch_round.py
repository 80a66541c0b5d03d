#!/usr/bin/env python3
"""One federated round in plain PyTorch: clients one after another, eager. Prints one JSON line.

Synthetic images on the device; local Adam (1e-3, weight decay 5e-5), batch 64. FedProj adds a memory batch of 256 to
every step, and the server's distillation: logits of all clients on the public set, then one epoch of the student.
"""
import argparse
import copy
import json

import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from networks import CLASSES, NAMES, build, images, labels
from timing import clock

BATCH, MEMORY_BATCH, TEMPERATURE = 64, 256, 3


def distance(logits, targets):
    """KL divergence of softened predictions."""
    predictions = log_softmax(logits / TEMPERATURE, 1)
    return kl_div(predictions, softmax(targets / TEMPERATURE, 1), reduction="batchmean")


def gradient(model, loss):
    """The gradient of `loss` as one vector."""
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


def project(model, loss, memory_loss):
    """Sets the gradient of `loss`, without its part against the gradient of `memory_loss`."""
    g, r = gradient(model, loss), gradient(model, memory_loss())
    product = g @ r
    if product < 0:
        g = g - product / (r @ r + 1e-8) * r
    pieces = g.split([p.numel() for p in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter)


class Round:
    def __init__(self, args):
        self.args = args
        self.model = build(args.model).to(args.device)
        self.clients = [(images(args.samples, args.device), labels(args.samples, args.device)) for _ in range(args.clients)]
        n_public = 1 if args.method == "fedavg" else args.public
        self.public = images(n_public, args.device)
        self.targets = torch.randn(n_public, CLASSES, device=args.device)

    def train(self, x, y):
        """Trains one client from the global model."""
        model = copy.deepcopy(self.model).train()
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=5e-5)
        for _ in range(self.args.epochs):
            for batch in torch.randperm(len(x), device=x.device).split(BATCH):
                adam.zero_grad()
                loss = cross_entropy(model(x[batch]), y[batch])
                if self.args.method == "fedproj":
                    project(model, loss, lambda: self.memory_loss(model))
                else:
                    loss.backward()
                adam.step()
        return model

    def memory_loss(self, model):
        memory = torch.randint(0, len(self.public), (MEMORY_BATCH,), device=self.public.device)
        return distance(model(self.public[memory]), self.targets[memory])

    def distil(self, models):
        """Trains a student on the mean logits of the clients."""
        batches = self.public.split(MEMORY_BATCH)
        with torch.no_grad():
            teacher = sum(torch.cat([model.eval()(batch) for batch in batches]) for model in models) / len(models)
        student = copy.deepcopy(models[0]).train()
        adam = torch.optim.Adam(student.parameters(), lr=1e-5)
        for batch, targets in zip(batches, teacher.split(MEMORY_BATCH)):
            adam.zero_grad()
            (TEMPERATURE**2 * distance(student(batch), targets)).backward()
            adam.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedproj", choices=["fedavg", "fedproj"])
    parser.add_argument("--model", default="resnet8", choices=NAMES)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--samples", type=int, default=500, help="per client")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--public", type=int, default=60_000, help="images of the public set")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True

    work = Round(args)
    if args.device == "cuda":
        work.train(*work.clients[0])  # warm up
    start = clock(args.device)
    models = [work.train(*client) for client in work.clients]
    trained = clock(args.device)
    if args.method == "fedproj":
        work.distil(models)
    end = clock(args.device)
    result = {"peer": f"torch {torch.__version__}", "method": args.method, "model": args.model, "device": args.device,
              "clients": args.clients, "local_s": trained - start, "server_s": end - trained, "round_s": end - start}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
