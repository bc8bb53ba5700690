"""A small BERT reads docstrings, one package of the standard library after the other.

The text is real and on every machine: docstrings of Python's own modules. Each is a row of word
numbers and a mask of what is padding, a dict that the model takes as keyword arguments. Which
package does a docstring come from? Every batch is predicted before it is learned, and a fifth of
all docstrings is held out for the end.

Needs transformers (pip install "proxreplay[integrations]"); nothing is downloaded.
"""

import ast
import random
import re
import sysconfig
import zlib
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

from proxreplay import LPR, Learner, prequential

PACKAGES = ("asyncio", "email", "unittest", "xml", "logging", "multiprocessing")
WORDS, LENGTH, EACH = 2000, 24, 100  # numbers of words, words per text, texts per package


def docstrings(package: str) -> list[str]:
    """Docstrings of at least five words in a package, each once."""
    found: dict[str, None] = {}
    nodes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    for path in sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, nodes) else None
            if text and len(text.split()) >= 5:
                found[text] = None
    return list(found)


def encode(texts: list[str]) -> dict[str, torch.Tensor]:
    """Words as numbers from 2 on, by their checksum; 1 begins a text, 0 is padding."""
    ids = torch.zeros(len(texts), LENGTH, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        words = re.findall(r"[a-z]+", text.lower())[: LENGTH - 1]
        numbers = [1, *(2 + zlib.crc32(word.encode()) % WORDS for word in words)]
        row[: len(numbers)] = torch.tensor(numbers)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def main() -> None:
    stream, held_out = [], []
    for package in PACKAGES:
        texts = docstrings(package)
        random.Random(0).shuffle(texts)
        texts = texts[:EACH]
        cut = len(texts) * 4 // 5
        stream += [(text, package) for text in texts[:cut]]
        held_out += [(text, package) for text in texts[cut:]]

    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS + 2,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            num_labels=len(PACKAGES),
            hidden_dropout_prob=0.0,
        )
    )
    learner = Learner(
        model,
        rule=LPR(model, omega_0=1.0),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
        steps_per_batch=8,
    )
    texts, packages = zip(*stream, strict=True)
    for step in prequential(learner, encode(list(texts)), list(packages), batch_size=10):
        if (step.number + 1) % 8 == 0:  # the end of a package
            print(
                f"{step.examples:4d} docstrings, now {step.labels[-1]:15}"
                f" prequential accuracy {step.accuracy:.2f}, of late {step.fading:.2f}"
            )
    texts, packages = zip(*held_out, strict=True)
    accuracy = learner.evaluate(encode(list(texts)), list(packages))
    print(f"all {len(PACKAGES)} packages, held out: accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
