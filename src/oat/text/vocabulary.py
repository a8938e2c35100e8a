"""A check that a tokenizer and a model can belong together. It compares the tokenizer's number of tokens with
the number of rows of the model's embeddings.

Many published models have more rows than tokens. Rows without a token are never sampled. Examples:

* rows rounded up to a multiple: OPT has 50,272 rows for 50,265 tokens, HyenaDNA, which reads DNA, has 16 for
  12;
* room for later tokens: BLOOM has 250,880 rows for 250,680 tokens, DeepSeek's first models have 102,400 for
  100,015.

Among the language models that were examined, the lowest share of rows with a token is 0.977. Other models
have lower shares: SELFormer, which reads molecules, has 800 rows for 428 tokens.
"""

from typing import Any

from oat.errors import ModelError, warn

_MULTIPLE = 128
"""The check accepts a model if fewer than this number of its embedding rows lack a token. The number of
embedding rows was probably rounded up."""
_DOUBTFUL, _IMPOSSIBLE = 0.9, 0.5
"""Limits of the share of embedding rows that have a token. A share below the first limit gives a warning; a
share below the second is an error."""


def num_ids(tokenizer: Any) -> int:
    """Return the highest id of a tokenizer plus 1. Some lower ids may have no token."""
    return 1 + max(tokenizer.get_vocab().values())


def check_vocabulary(tokenizer: Any, rows: int, whose: str) -> None:
    """Compare the size of a tokenizer with the size of a model's embeddings. Warn if tokenizer and model are
    unlikely to belong together.

    Args:
        rows: number of rows of the embeddings.
        whose: name of the tokenizer in messages, as the subject of a sentence.

    Raises:
        ModelError: a token has no row, or more than half of the rows have no token.
    """
    ids: dict[str, int] = tokenizer.get_vocab()
    last = max(ids, key=lambda token: ids[token])
    if ids[last] >= rows:
        raise ModelError(
            f"{whose} has {len(ids)} tokens, up to id {ids[last]} ({last!r}), and the model's embeddings "
            f"have {rows} rows; give the tokenizer "
            "that belongs to the model, or resize the model's embeddings for tokens that were added"
        )
    count = ids[last] + 1
    if rows - count < _MULTIPLE or count >= _DOUBTFUL * rows:
        return
    found = f"{whose} has {count} tokens, and the model's embeddings have {rows} rows"
    if count < _IMPOSSIBLE * rows:
        raise ModelError(
            f"{found}: this cannot be the tokenizer of this model; give the tokenizer that belongs to the "
            "model, or, for one that is made for this "
            f"tokenizer, cut what nothing uses (model.resize_token_embeddings({count}))"
        )
    warn(f"{found}, an unusual share: if the responses make no sense, the tokenizer is another model's")
