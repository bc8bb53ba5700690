import torch
from torch import Tensor

from proxreplay.data import Examples
from proxreplay.evaluation import evaluate


def test_accuracy_and_loss_a_task_equal_a_loop_over_examples() -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, generator=rng)
    tasks = [
        Examples(torch.randn(n, 3, generator=rng), torch.randint(0, 4, (n,), generator=rng))
        for n in (7, 12)
    ]
    outcome = evaluate(lambda x: x @ weight, tasks, batch_size=5)
    for task, accuracy, loss in zip(tasks, outcome.accuracy, outcome.loss, strict=True):
        hits, total = 0, 0.0
        for x, y in zip(task.inputs, task.labels, strict=True):
            z = x @ weight
            hits += int(z.argmax() == y)
            total += float(z.exp().sum().log() - z[y])
        assert accuracy == hits / len(task)
        torch.testing.assert_close(loss, total / len(task), rtol=1e-5, atol=1e-6)


def test_classes_without_an_output_count_as_errors() -> None:
    def one_output(x: Tensor) -> Tensor:
        return torch.ones(len(x), 1)

    task = Examples(torch.zeros(4, 2), torch.tensor([0, 0, 2, 2]))
    assert evaluate(one_output, [task]).accuracy == [0.5]
