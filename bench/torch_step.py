#!/usr/bin/env python3
"""One training step in PyTorch: forward, backward and Adam on synthetic images or texts. Prints one JSON line.

Images run in both of PyTorch's memory formats and the faster counts. Texts are padded to the longest of the batch.
"""
import argparse
import json

import torch
from torch.nn.functional import cross_entropy

from networks import NAMES, WORDS, build, images, labels
from timing import clock, middle

# Tokens of SST-2's training sentences, the quantiles at 1/64, 3/64 … 63/64: those of `fedproj bench step`.
SST2 = [3, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 8, 8, 9, 9, 10, 11, 11, 12, 13, 14, 15, 16, 17, 18, 20, 22, 24, 26, 29, 34, 42]


def texts(args):
    """Random words, and where each text has ended (None if all texts have one length)."""
    lengths = [args.length] * args.batch
    if args.lengths == "sst2":
        lengths = [min(SST2[i % len(SST2)], args.length) for i in range(args.batch)]
    ids = torch.randint(0, WORDS, (args.batch, max(lengths)), device=args.device)
    if min(lengths) == max(lengths):
        return [ids]
    ends = torch.tensor(lengths, device=args.device).unsqueeze(1)
    return [ids, torch.arange(max(lengths), device=args.device) >= ends]


def train(args, model, inputs):
    """Median seconds of a step."""
    targets = labels(args.batch, args.device)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    seconds = []
    for _ in range(args.steps):
        start = clock(args.device)
        adam.zero_grad()
        cross_entropy(model(*inputs), targets).backward()
        adam.step()
        seconds.append(clock(args.device) - start)
    return middle(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet8", choices=NAMES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="max tokens per text")
    parser.add_argument("--lengths", default="full", choices=["full", "sst2"])
    parser.add_argument("--no-dropout", action="store_true", help="of the encoder")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = True

    def step(**placement):
        model = build(args.model, dropout=0.0 if args.no_dropout else 0.1)
        return train(args, model.to(args.device, **placement).train(), inputs(**placement))

    if args.model == "minilm-l3":
        inputs = lambda: texts(args)
        seconds = step()
    else:
        inputs = lambda memory_format: [images(args.batch, args.device).to(memory_format=memory_format)]
        seconds = min(step(memory_format=layout) for layout in (torch.contiguous_format, torch.channels_last))
    result = {"peer": f"torch {torch.__version__}", "model": args.model, "batch": args.batch, "device": args.device,
              "threads": args.threads, "ms_per_step": 1e3 * seconds, "samples_per_second": args.batch / seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
