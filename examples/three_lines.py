"""LPR in a training loop of one's own: three lines, marked 1 to 3.

Handwritten digits 0 to 4 are learned first, then 5 to 9, while 50 of the first are replayed all the
time. Right after the switch plain replay forgets a good part of the first digits, LPR less of them.
Run it with ``python examples/three_lines.py``.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from proxreplay import LPR


def train(tasks: list[tuple[Tensor, Tensor]], use_lpr: bool, seed: int) -> float:
    """Learn both tasks; the lowest accuracy on the first while the second is learned."""
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if use_lpr:
        lpr = LPR(model).attach(optimizer)  # 1: where the optimizer is made

    (first_x, first_y), _ = tasks
    memory_x, memory_y = first_x[:50], first_y[:50]
    step, lowest = 0, 1.0
    for number, (x, y) in enumerate(tasks):
        for start in range(50, len(x), 10):
            replay = torch.randint(0, 50, (10,), generator=rng)
            inputs = torch.cat([x[start : start + 10], memory_x[replay]])
            labels = torch.cat([y[start : start + 10], memory_y[replay]])
            for _ in range(3):
                if use_lpr and step % 30 == 0:  # 2: now and then
                    lpr.refresh(memory_x)  # 3: what must not be forgotten
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                step += 1
            if number == 1:
                right = model(first_x[50:]).argmax(dim=1) == first_y[50:]
                lowest = min(lowest, right.float().mean().item())
    return lowest


def main() -> None:
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    tasks = [(x[y < 5], y[y < 5]), (x[y >= 5], y[y >= 5])]
    for name, use_lpr in {"plain replay": False, "with LPR": True}.items():
        scores = [train(tasks, use_lpr, seed) for seed in range(2)]
        print(f"{name}: {sum(scores) / 2:.3f} at worst on the first digits")


if __name__ == "__main__":
    main()
