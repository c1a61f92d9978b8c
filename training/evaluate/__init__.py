"""Evaluations of a base: `python -m training evaluate CKPT`, and `select A B ...` to choose one.

| evaluation | number | better |
|---|---|---|
| held-out loss | nats per token and bits per byte of held-out documents | lower |
| codebase perplexity | summed NLL of a code base's files, alphabetically, with a rolling window before each token | lower |
| state tracking | distance in characters between a file rebuilt after many diffs and the true one | lower |
| knowledge | share of functions whose docstring is told from three others | higher |
| pass@k | share of HumanEval's tasks that one of k answers solves | higher |

Bits per byte and the summed NLL compare models of different tokenizers. The report chooses its base by knowledge, state tracking
and codebase perplexity; its questions and code bases are not disclosed, ours are made from the corpus.
"""

from training.evaluate.lm import LM, load_lm
from training.evaluate.table import evaluate, select

__all__ = ["LM", "evaluate", "load_lm", "select"]
