"""The size of a tokenizer against the embeddings of a model: can they belong together?

Many published models have more rows of embeddings than their tokenizer has tokens. Some round up to a
multiple (OPT has 50,272 for 50,265, HyenaDNA 16 for 12); others leave room for tokens to come (BLOOM has
250,880 for 250,680, DeepSeek's first models 102,400 for 100,015). The lowest share of rows with a token is
0.977 among the language models that we know; SELFormer, which reads molecules, has 800 rows for 428 tokens.
Rows without a token are never sampled.
"""

from typing import Any

from oat.errors import ModelError, warn

_MULTIPLE = 128
"""Fewer rows without a token than this come from rounding up, however few tokens there are."""
_DOUBTFUL, _IMPOSSIBLE = 0.9, 0.5
"""Shares of rows with a token below which a pair is warned of, and refused."""


def num_ids(tokenizer: Any) -> int:
    """The number of ids of a tokenizer, up to its greatest, even if some below it are no tokens."""
    return 1 + max(tokenizer.get_vocab().values())


def check_vocabulary(tokenizer: Any, rows: int, whose: str) -> None:
    """Compare a tokenizer with the embeddings of a model, and warn if they are an unlikely pair.

    Args:
        rows: rows of the embeddings.
        whose: the tokenizer's name for messages, as the subject of a sentence.

    Raises:
        ModelError: a token has no row, or most rows have no token.
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
