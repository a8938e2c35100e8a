"""Whether a tokenizer can be the one of a model, as far as numbers can tell.

Many published models have more rows of embeddings than their tokenizer has tokens: rounded up to a multiple
(OPT has 50,272 for 50,265, HyenaDNA 16 for 12), or with room for tokens to come (BLOOM has 250,880 for
250,680, DeepSeek's first ones 102,400 for 100,015). Of the language models that we know the least share is
0.977; SELFormer, which reads molecules, has 800 rows for 428 tokens. Rows that no token has are never
sampled.
"""

from typing import Any

from oat.errors import ModelError, warn

_MULTIPLE = 128
"""Fewer spare rows than this are those of rounding up, however few tokens there are."""
_DOUBTFUL, _IMPOSSIBLE = 0.9, 0.5
"""Shares of rows that tokens have, below which a pair is warned of, and refused."""


def num_ids(tokenizer: Any) -> int:
    """Ids that a tokenizer writes and reads: up to its greatest, whether or not each below is a token."""
    return 1 + max(tokenizer.get_vocab().values())


def check_vocabulary(tokenizer: Any, rows: int, whose: str) -> None:
    """Hold a tokenizer against the embeddings of a model, and warn where they are an unlikely pair.

    Args:
        rows: of the embeddings.
        whose: the tokenizer, as the subject of a sentence.

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
