"""The end of an implicit prompt: the place at which two texts that begin alike are split into a prompt and
two responses.

The prompt is at most the common beginning of both texts. It ends

* not inside a word: "the mat" and "the man" share "the", not "the ma". A number such as 3.14 and a word such
  as don't are words too. Scripts without blanks between words are split between any two characters;
* where the tokenizer splits both texts. Otherwise no ids of a response could follow those of the prompt as
  they do in the text (`text/joining.py`);
* before a blank rather than behind it, as in TRL's `extract_prompt`. Then the blank belongs to the responses.

If no place is right for the tokenizer, the last one that splits no word is taken. If there is none, the texts
have no prompt.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator

Border = Callable[[str, str], bool]
"""A function that says whether a tokenizer splits the text that two texts make together between the two."""

_WORD = re.compile(r"\w[\w\u200d\ufe0f]*(?:(?:['\u2019]|(?<=\d)[.,](?=\d))\w+)*")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""A character of a script without blanks between words: Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
_MOST_PLACES = 64
_REACH = 2048
"""Number of characters before the end of the common beginning among which a place is looked for."""


def implicit_end(first: str, second: str, is_border: Border) -> int:
    """Return the number of characters of the prompt that two texts share, 0 if they share no word; see the
    head of this file."""
    common = next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    places = [place for place in _places(first, second, common) if first[:place].strip()]
    for place in places[:_MOST_PLACES]:
        if all(is_border(text[:place], text[place:]) for text in (first, second)):
            return place
    return places[0] if places else 0


def _places(first: str, second: str, common: int) -> Iterator[int]:
    """Yield the places up to `common`, from the last, at which neither text has a word."""
    start = max(0, common - _REACH)
    within = _within_words(first, start, common) | _within_words(second, start, common)
    seen = dict[int, None]()
    for place in range(common, start, -1):
        for end in (_before_blank(first, place), place):
            if place not in within and end not in seen:
                seen[end] = None
                yield end


def _before_blank(text: str, place: int) -> int:
    return place - text[:place].endswith(" ")


def _within_words(text: str, start: int, most: int) -> set[int]:
    """Return the places from `start` to `most` at which a word, or a character with its marks, would be
    split."""
    within = set[int]()
    for word in _WORD.finditer(text, start):
        if word.start() > most:
            break
        within |= {
            place
            for place in range(word.start() + 1, word.end())
            if not any(map(_UNSPACED.match, text[place - 1 : place + 1]))
        }
    places = range(max(1, start), min(most + 1, len(text)))
    return within | {place for place in places if _continues(text, place)}


def _continues(text: str, place: int) -> bool:
    """Return True if the character at a place belongs to the one before it. Vowel signs, as in Hindi, and
    accents are marks. A letter behind one goes on with the word, which `_WORD` does not know."""
    before, after = text[place - 1], text[place]
    return (
        before == "\u200d"
        or after in "\u200d\ufe0f"
        or _is_mark(after)
        or (_is_mark(before) and bool(re.match(r"\w", after)) and not _UNSPACED.match(before))
    )


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")
