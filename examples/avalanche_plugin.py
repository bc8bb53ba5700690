"""LPR inside Avalanche 0.6: a plug-in of a few lines, only where avalanche-lib is installed.

pip install avalanche-lib
python examples/avalanche_plugin.py
"""

from collections.abc import Iterator

import torch
from avalanche.benchmarks import benchmark_from_datasets
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.core import SupervisedPlugin
from avalanche.training.supervised import Naive
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from proxreplay import LPR


class LPRPlugin(SupervisedPlugin):
    """Refreshes LPR from examples of earlier experiences; gradients are changed by `attach`."""

    def __init__(self, every: int = 30, samples: int = 200) -> None:
        super().__init__()
        self.every, self.samples = every, samples
        self.rule: LPR | None = None
        self.kept: list[torch.Tensor] = []
        self.steps = 0

    def before_training_exp(self, strategy, **kwargs) -> None:
        """Avalanche may have made a new optimizer, or have grown the head."""
        if self.rule is None:
            self.rule = LPR(strategy.model)
        self.steps = 0
        if self.kept:  # nothing can be forgotten before
            self.rule.attach(strategy.optimizer)

    def before_training_iteration(self, strategy, **kwargs) -> None:
        """Rebuild from what must not be forgotten."""
        if self.kept and self.steps % self.every == 0:
            self.rule.refresh(torch.cat(self.kept).to(strategy.device))
        self.steps += 1

    def after_training_exp(self, strategy, **kwargs) -> None:
        """Keep some inputs of the experience."""
        self.kept.append(next(_inputs(strategy.experience.dataset, self.samples)))


def _inputs(dataset, n: int) -> Iterator[torch.Tensor]:
    for batch in DataLoader(dataset, batch_size=n, shuffle=True):
        yield batch[0]


def experiences(tasks: int = 3, n: int = 400) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two classes per task; the classes of every task lie elsewhere."""
    rng = torch.Generator().manual_seed(0)
    centres = 3 * torch.randn(tasks, 2, 8, generator=rng)
    found = []
    for task in range(tasks):
        labels = torch.randint(2, (n,), generator=rng)
        inputs = centres[task, labels] + torch.randn(n, 8, generator=rng)
        found.append((inputs, labels + 2 * task))
    return found


def main() -> None:
    data = experiences()
    datasets = []
    for inputs, labels in data:
        dataset = TensorDataset(inputs, labels)
        dataset.targets = labels.tolist()
        datasets.append(as_classification_dataset(dataset))
    benchmark = benchmark_from_datasets(train=datasets)
    for name, plugins in {"naive": [], "LPR": [LPRPlugin()]}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 6))
        strategy = Naive(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
            criterion=nn.CrossEntropyLoss(),
            train_mb_size=10,
            plugins=plugins,
            evaluator=None,
        )
        for experience in benchmark.streams["train"]:
            strategy.train(experience)
        model.eval()
        right = [(model(x).argmax(1) == y).float().mean().item() for x, y in data]
        print(f"{name:6} accuracy per task: " + " ".join(f"{one:.2f}" for one in right))


if __name__ == "__main__":
    main()
