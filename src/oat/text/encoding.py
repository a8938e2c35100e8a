"""The encoding of a text to ids. If a tokenizer's class has no code of its own for the encoding, the library
`tokenizers` is called directly. This takes two thirds of the time that a call through transformers takes."""

from typing import TYPE_CHECKING

from oat.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Encoder:
    """An encoder of texts with one tokenizer, without truncation or padding."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        from transformers import PreTrainedTokenizerFast

        self.tokenizer = tokenizer
        own, plain = type(tokenizer), PreTrainedTokenizerFast
        self._adds_nothing = all(
            getattr(own, name, None) is getattr(plain, name, 0) for name in ("__call__", "_encode_plus")
        )

    def ids(self, text: str, *, adds: bool, splits: bool | None = None) -> tuple[list[int], list[int]]:
        """Return the ids of a text, and a mask: 1 for each special token that the tokenizer added, 0 for each
        other token.

        Args:
            adds: True adds the special tokens that the tokenizer puts before or after a text.
            splits: True reads special tokens within the text as ordinary text; None follows the tokenizer's
                own setting.

        Raises:
            TemplateError: the tokenizer cannot encode the text.
        """
        try:
            return (
                self._direct(text, adds=adds, splits=splits)
                if self._adds_nothing
                else self._called(text, adds=adds, splits=splits)
            )
        except Exception as error:  # the library raises no narrower class of error
            raise TemplateError(
                f"the tokenizer of {self.tokenizer.name_or_path or 'the model'} cannot encode {text[:80]!r} "
                f"({error}); give another model (`model.path`), one whose tokenizer knows the text or has an "
                "unknown token, or change the text"
            ) from error

    def takers(self) -> dict[str, tuple[bool, bool]]:
        """Return the texts of the added tokens that take away white space, each with True if it takes what
        stands before it (`lstrip`), and what stands behind it (`rstrip`), as the tokens of Phi-3 do."""
        tokens = self.tokenizer.added_tokens_decoder.items()
        return {
            token.content: (token.lstrip, token.rstrip)
            for id, token in tokens
            if (token.lstrip or token.rstrip)
            and not token.single_word
            and self.ids(token.content, adds=False)[0] == [id]
        }

    def _direct(self, text: str, *, adds: bool, splits: bool | None) -> tuple[list[int], list[int]]:
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is not None or backend.padding is not None:
            backend.no_truncation()
            backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens if splits is None else splits
        # `encode` would also compute the offsets of each token
        (found,) = backend.encode_batch_fast([text], add_special_tokens=adds)
        return found.ids, found.special_tokens_mask

    def _called(self, text: str, *, adds: bool, splits: bool | None) -> tuple[list[int], list[int]]:
        own = {} if splits is None else {"split_special_tokens": splits}
        found = self.tokenizer(
            text, verbose=False, add_special_tokens=adds, return_special_tokens_mask=True, **own
        )
        return list(found["input_ids"]), list(found["special_tokens_mask"])

    def is_border(self, before: str, after: str) -> bool:
        """Return True if the ids of the first text are the beginning of the ids of both together."""
        whole = self.ids(before + after, adds=False)[0]
        ids = self.ids(before, adds=False)[0]
        return whole[: len(ids)] == ids
