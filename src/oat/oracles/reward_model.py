"""The oracle `reward_model`: a sequence-classification model of transformers, which scores every candidate in
this process."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oat.errors import ConfigError, OracleError, TemplateError
from oat.lazy import lazily
from oat.oracles.local import LocalOracle, Values
from oat.types import Message, Question

if TYPE_CHECKING:
    from oat.models import scoring
else:
    scoring = lazily("oat.models.scoring")


class RewardModelOracle(LocalOracle):
    """An oracle that scores with a reward model. The module `oat.models.scoring` describes the model's input
    and the output that is the score. The weights are loaded at the first question.

    Its version changes with the model's files, the label and the precision.

    Args:
        path: a directory, or `org/name`.
        dtype: "float32", or "bfloat16" for half the memory.
        label: the index of the label that is the score, for a model that has several labels.
        batch_tokens: largest number of tokens in a forward pass, padding included.
        max_tokens: largest number of tokens of a prompt with its response; by default as many as the model
            can read. A longer text is never cut.
        overflow: what happens to a longer text. "abstain": the response gets no score, and is counted in
            answers/abstained_frac. "refuse": an error is raised.
        device: where the model computes; by default the device of `compute.profile`.

    Raises:
        ConfigError, ModelError: as in `oat.models.scoring.Scorer`.
        ConfigError: an option has a value that it does not take.
    """

    when_it_abstains = (
        "its texts are longer than it reads; see its options max_tokens and overflow, and "
        "sampling.max_new_tokens"
    )

    def __init__(
        self,
        path: str,
        dtype: str = "float32",
        label: int | None = None,
        batch_tokens: int = 16384,
        max_tokens: int | None = None,
        overflow: str = "abstain",
        device: str = "cpu",
    ):
        super().__init__("reward_model")
        for option, value in {"batch_tokens": batch_tokens, "max_tokens": max_tokens}.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{option} is {value!r}; give a whole number above 0")
        if label is not None and not isinstance(label, int):
            raise ConfigError(f"label is {label!r}; give the number of a label")
        if overflow not in ("abstain", "refuse"):
            raise ConfigError(f"overflow is {overflow!r}; give abstain or refuse")
        self.scorer = scoring.Scorer(
            path, dtype=dtype, device=device, label=label, batch_tokens=batch_tokens, max_tokens=max_tokens
        )
        self.overflow = overflow
        self.version = f"{self.scorer.version}/{self.scorer.label}/{self.scorer.dtype}"
        options = {"label": self.scorer.label, "dtype": self.scorer.dtype}
        self.made_of = {**self.scorer.identity, "options": options}

    def values(self, questions: Sequence[Question]) -> Values:
        """Return the scores of each question's candidates; None for a candidate that is too long with its
        prompt.

        Raises:
            OracleError: the template refuses a conversation; a score is not finite; or a text is too long and
                `overflow` is "refuse".
        """
        rows = [
            self._encoded(question.messages, text) for question in questions for text in question.candidates
        ]
        scores = self.scorer.score(rows)
        if self.overflow == "refuse" and None in scores:
            long = rows[scores.index(None)]
            raise OracleError(
                f"a prompt with its response has {len(long.ids)} tokens of the reward model "
                f"{self.scorer.path}, and may have {self.scorer.limit}; "
                "set prompts.max_tokens or sampling.max_new_tokens lower, or overflow: abstain"
            )
        left = iter(scores)
        return [[next(left) for _ in question.candidates] for question in questions]

    def _encoded(self, messages: Sequence[Message], response: str) -> scoring.Encoded:
        try:
            return self.scorer.encode(messages, response)
        except TemplateError as error:
            special = [token for token in self.scorer.tokenizer.all_special_tokens if token in response]
            hint = f"; render.special_tokens: drop takes `{special[0]}` out of responses" if special else ""
            message = f"the reward model {self.scorer.path} cannot be asked: {error}{hint}"
            raise OracleError(message) from error
