"""The oracle `pairrm`: a DeBERTa that reads a prompt with two responses at once and says which is better
(LLM-Blender, arXiv:2306.02561, Section 4).

The format is that of `llm-blender/PairRM-hf`, from its model card and the class `DebertaV2PairRM` of
yuchenlin/LLM-Blender: one row of three pieces

    [CLS] <|source|> prompt [SEP]  [CLS] <|candidate1|> first [SEP]  [CLS] <|candidate2|> second [SEP]

The prompt's piece has at most `source_tokens` tokens, by default 1,224. The row has at most `source_tokens` +
2 * `candidate_tokens` tokens, by default 2,048. Each response's piece has at most half of the tokens that the
prompt's piece leaves. Longer pieces are cut on the right.

For each candidate, the hidden state of the source's marker is concatenated with that of the candidate's
marker. Two linear layers, with a tanh between them, map this to one output per task of the model. The
difference between the two candidates' outputs, averaged over the tasks, is the log-odds that the first wins.

Departure: both orders are asked, and the answer is the mean of the two probabilities. So the answers for
(A, B) and (B, A) add up to 1.

Not handled: conversations of several messages, because the format has one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oat.errors import ConfigError, OracleError
from oat.lazy import lazily
from oat.oracles.local import LocalOracle, Values
from oat.types import Kind, Question

if TYPE_CHECKING:
    import torch

    from oat.models import identity, pairrm, scoring
else:
    torch = lazily("torch")
    identity, pairrm, scoring = (lazily(f"oat.models.{name}") for name in ("identity", "pairrm", "scoring"))


class PairRM(LocalOracle):
    """An oracle that compares pairs with a PairRM. The weights are loaded at the first question.

    Its version changes with the model's files, `dtype`, `source_tokens` and `candidate_tokens`.

    Args:
        path: a directory, or `org/name`, in the layout of `llm-blender/PairRM-hf`.
        dtype: "float32", or "bfloat16" for half the memory; the head is always float32.
        batch_tokens: largest number of tokens in a forward pass, padding included.
        source_tokens: largest number of tokens of the prompt, its three special tokens included. None: 1224,
            as PairRM was trained.
        candidate_tokens: largest number of tokens of each response if the prompt has `source_tokens`. A
            shorter prompt leaves more tokens to the responses. None: 412, as PairRM was trained.
        device: where the model computes; by default the device of `compute.profile`.

    Raises:
        ConfigError: an option has a value that it does not take.
        ModelError: there is no such model or tokenizer, it is no PairRM, or the tokenizer is not the model's.
    """

    answers: Kind = "compare"

    def __init__(
        self,
        path: str = "llm-blender/PairRM-hf",
        dtype: str = "float32",
        batch_tokens: int = 16384,
        source_tokens: int | None = None,
        candidate_tokens: int | None = None,
        device: str = "cpu",
    ):
        super().__init__("pairrm")
        for option, value in {
            "batch_tokens": batch_tokens,
            "source_tokens": source_tokens,
            "candidate_tokens": candidate_tokens,
        }.items():
            if (value is not None or option == "batch_tokens") and (not isinstance(value, int) or value < 4):
                raise ConfigError(f"{option} is {value!r}; give a whole number, at least 4")
        source_tokens = source_tokens or pairrm.SOURCE_TOKENS
        candidate_tokens = candidate_tokens or pairrm.CANDIDATE_TOKENS
        self.model = pairrm.PairRMModel(path, dtype, device)
        self.path = path
        self.batch_tokens = batch_tokens
        self.source_tokens, self.candidate_tokens = source_tokens, candidate_tokens
        self.version = f"{scoring.hash_of_files(path)}/{dtype}/{source_tokens}/{candidate_tokens}"
        self.made_of = {
            **identity.model_identity(self.model.config),
            **identity.tokenizer_identity(self.model.tokenizer),
            **identity.weights_identity(path),
            "options": {
                "dtype": dtype,
                "source_tokens": source_tokens,
                "candidate_tokens": candidate_tokens,
            },
        }

    def encode(self, source: str, first: str, second: str) -> list[int]:
        """Return the ids of a prompt with two responses, at most `source_tokens` + 2 * `candidate_tokens`."""
        most = self.source_tokens + 2 * self.candidate_tokens
        ids = self.model.piece("source_prefix_id", source, self.source_tokens)
        room = (most - len(ids)) // 2
        return [
            *ids,
            *self.model.piece("cand1_prefix_id", first, room),
            *self.model.piece("cand2_prefix_id", second, room),
        ]

    def values(self, questions: Sequence[Question]) -> Values:
        """Return, for each pair, the probability that the first candidate wins.

        Raises:
            OracleError: a prompt has several messages, or a number is not finite.
        """
        rows = []
        for question in questions:
            if len(question.messages) != 1:
                raise OracleError(
                    f"pairrm reads one text as the prompt, and question {question.key} has "
                    f"{len(question.messages)} messages; use another oracle"
                )
            source, (first, second) = question.messages[0].content, question.candidates
            rows += [self.encode(source, first, second), self.encode(source, second, first)]
        logits = torch.zeros(len(rows))
        for batch in scoring.batches([len(row) for row in rows], self.batch_tokens):
            logits[batch] = self._logits([rows[number] for number in batch])
        if not logits.isfinite().all():
            raise OracleError(
                f"{self.path} gives a score that is not finite; use another model, or dtype: float32"
            )
        found = ((logits[0::2].sigmoid() + (-logits[1::2]).sigmoid()) / 2).tolist()
        return [[value] for value in found]

    def _logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the log-odds that the first candidate of each row wins: (N,), float32, on the CPU."""
        with torch.no_grad():
            source, first, second = self.model.marked(rows, pairrm.COMPARING)
            head = self.model.modules[1]
            difference = head(torch.cat([source, first], -1)) - head(torch.cat([source, second], -1))
            return difference.mean(-1).cpu()
