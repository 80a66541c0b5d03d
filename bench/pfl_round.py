#!/usr/bin/env python3
"""Rounds of the pfl-research CIFAR-10 benchmark in pfl, on synthetic images. Prints one JSON line.

1000 users with 50 images each, a cohort of 50, one local epoch of batch 10, SGD 0.1.
"""
import argparse
import json
from importlib.metadata import version

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn.functional import cross_entropy

from networks import build, images, labels
from timing import clock, middle

USERS, SAMPLES, COHORT = 1000, 50, 50


class Classifier(nn.Module):
    """A network with the two functions that pfl calls."""

    def __init__(self):
        super().__init__()
        self.network = build("cnn")

    def loss(self, x, y, eval=False):
        self.train(not eval)
        return cross_entropy(self.network(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        return {"loss": Weighted(self.loss(x, y, eval=True).item() * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when each round ended."""

    def __init__(self, device):
        self.device, self.ends = device, []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.ends.append(clock(self.device))
        return False, Metrics()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    x = images(USERS * SAMPLES, args.device).split(SAMPLES)
    y = labels(USERS * SAMPLES, args.device).split(SAMPLES)
    user = lambda id: Dataset(raw_data=[x[id], y[id]], user_id=id)
    users = FederatedDataset(user, get_user_sampler("random", list(range(USERS))))
    network = Classifier().to(args.device)
    server = torch.optim.SGD(network.parameters(), lr=1.0)
    ends = Clock(args.device)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=args.rounds, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=PyTorchModel(network, torch.optim.SGD, server),
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=10),
        model_eval_params=NNEvalHyperParams(local_batch_size=10_000),
        callbacks=[ends],
    )
    round_s = middle([end - start for start, end in zip(ends.ends, ends.ends[1:])])
    result = {"peer": f"pfl {version('pfl')}", "torch": torch.__version__, "device": args.device,
              "threads": args.threads, "rounds": args.rounds, "round_s": round_s}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
