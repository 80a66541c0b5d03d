#!/usr/bin/env python3
"""One federated round in plain PyTorch: clients one after another, eager or as captured CUDA graphs. Prints one JSON line.

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
    g = g - torch.clamp(g @ r, max=0) / (r @ r + 1e-8) * r
    pieces = g.split([p.numel() for p in model.parameters()])
    for parameter, piece in zip(model.parameters(), pieces):
        parameter.grad = piece.view_as(parameter)


class Captured:
    """A function of tensors as a CUDA graph."""

    def __init__(self, function, *examples):
        self.inputs = [example.clone() for example in examples]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = function(*self.inputs)

    def __call__(self, *values):
        for place, value in zip(self.inputs, values):
            place.copy_(value)
        self.graph.replay()
        return self.output


class Trainer:
    """A model with Adam. With graphs, each size of batch is captured once; weights and moments stay in their places."""

    def __init__(self, model, step, graphs, **adam):
        self.model, self.step, self.graphs = copy.deepcopy(model).train(), step, {} if graphs else None
        self.adam = torch.optim.Adam(self.model.parameters(), capturable=graphs, **adam)

    def start_from(self, model):
        self.model.load_state_dict(model.state_dict())
        for state in self.adam.state.values():
            for moment in state.values():
                moment.zero_()

    def __call__(self, *batch):
        function = lambda *inputs: self.step(self.model, self.adam, *inputs)
        if self.graphs is None:
            return function(*batch)
        size = len(batch[0])
        if size not in self.graphs:
            self.graphs[size] = Captured(function, *batch)
        self.graphs[size](*batch)


class Round:
    def __init__(self, args):
        self.args = args
        self.model = build(args.model).to(args.device)
        self.clients = [(images(args.samples, args.device), labels(args.samples, args.device)) for _ in range(args.clients)]
        n_public = 1 if args.method == "fedavg" else args.public
        self.public = images(n_public, args.device)
        self.targets = torch.randn(n_public, CLASSES, device=args.device)

        self.trainer = Trainer(self.model, self.local_step, args.graphs, lr=1e-3, weight_decay=5e-5)
        self.student = Trainer(self.model, self.student_step, args.graphs, lr=1e-5)
        self.teacher = copy.deepcopy(self.model).eval()
        self.predict = None

    def warm_up(self):
        """Trains one client, and captures every graph."""
        self.train(*self.clients[0])
        if self.args.graphs and self.args.method == "fedproj":
            batches = self.public.split(MEMORY_BATCH)
            for batch in (batches[0], batches[-1]):
                self.student(batch, self.targets[: len(batch)])
            with torch.no_grad():
                self.predict = {len(batch): Captured(self.teacher, batch) for batch in (batches[0], batches[-1])}

    def local_step(self, model, adam, x, y):
        adam.zero_grad()
        loss = cross_entropy(model(x), y)
        if self.args.method == "fedproj":
            project(model, loss, lambda: self.memory_loss(model))
        else:
            loss.backward()
        adam.step()

    def student_step(self, model, adam, x, targets):
        adam.zero_grad()
        (TEMPERATURE**2 * distance(model(x), targets)).backward()
        adam.step()

    def train(self, x, y):
        """Trains one client from the global model."""
        self.trainer.start_from(self.model)
        for _ in range(self.args.epochs):
            for batch in torch.randperm(len(x), device=x.device).split(BATCH):
                self.trainer(x[batch], y[batch])
        return copy.deepcopy(self.trainer.model)

    def memory_loss(self, model):
        memory = torch.randint(0, len(self.public), (MEMORY_BATCH,), device=self.public.device)
        return distance(model(self.public[memory]), self.targets[memory])

    def logits(self, model, batches):
        self.teacher.load_state_dict(model.state_dict())
        predict = lambda batch: self.predict[len(batch)](batch).clone() if self.predict else self.teacher(batch)
        return torch.cat([predict(batch) for batch in batches])

    def distil(self, models):
        """Trains a student on the mean logits of the clients."""
        batches = self.public.split(MEMORY_BATCH)
        with torch.no_grad():
            teacher = sum(self.logits(model, batches) for model in models) / len(models)
        self.student.start_from(models[0])
        for batch, targets in zip(batches, teacher.split(MEMORY_BATCH)):
            self.student(batch, targets)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="fedproj", choices=["fedavg", "fedproj"])
    parser.add_argument("--model", default="resnet8", choices=NAMES)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--samples", type=int, default=500, help="per client")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--public", type=int, default=60_000, help="images of the public set")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--graphs", action="store_true", help="capture the steps as CUDA graphs")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True

    work = Round(args)
    if args.device == "cuda":
        work.warm_up()
    start = clock(args.device)
    models = [work.train(*client) for client in work.clients]
    trained = clock(args.device)
    if args.method == "fedproj":
        work.distil(models)
    end = clock(args.device)
    result = {"peer": f"torch {torch.__version__}", "method": args.method, "model": args.model, "device": args.device,
              "graphs": args.graphs, "clients": args.clients, "local_s": trained - start, "server_s": end - trained, "round_s": end - start}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
